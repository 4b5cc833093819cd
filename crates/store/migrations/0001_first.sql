-- Times are milliseconds since the epoch, UTC. JSON columns hold the model's own serialisation.

-- Facts about this database itself: which secret file its records were sealed with.
CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT;

CREATE TABLE workspaces (
    id         TEXT PRIMARY KEY,
    name       TEXT NOT NULL UNIQUE,
    created_ms INTEGER NOT NULL
) STRICT;

-- A key's text has 160 random bits, so its plain SHA-256 gives nothing away.
CREATE TABLE api_keys (
    id         TEXT PRIMARY KEY,
    workspace  TEXT NOT NULL REFERENCES workspaces (id),
    name       TEXT NOT NULL,
    hash       BLOB NOT NULL UNIQUE,
    created_ms INTEGER NOT NULL,
    revoked_ms INTEGER
) STRICT;

CREATE TABLE templates (
    id             TEXT PRIMARY KEY,
    workspace      TEXT REFERENCES workspaces (id),
    name           TEXT NOT NULL,
    state          TEXT NOT NULL,
    vcpus          INTEGER NOT NULL,
    memory_mib     INTEGER NOT NULL,
    disk_mib       INTEGER NOT NULL,
    recipe_digest  TEXT NOT NULL,
    env            TEXT NOT NULL,
    default_user   TEXT NOT NULL,
    default_cwd    TEXT,
    directory      TEXT NOT NULL,
    created_ms     INTEGER NOT NULL
) STRICT;

-- One usable template per name; its predecessors are `replaced`.
CREATE UNIQUE INDEX ready_template_names ON templates (coalesce(workspace, ''), name) WHERE state = 'ready';

-- `sequence` is the order of creation; cursors point into it, so it is never used twice.
CREATE TABLE sandboxes (
    sequence       INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT NOT NULL UNIQUE,
    workspace      TEXT NOT NULL REFERENCES workspaces (id),
    template       TEXT NOT NULL,
    template_name  TEXT NOT NULL,
    state          TEXT NOT NULL,
    vcpus          INTEGER NOT NULL,
    memory_mib     INTEGER NOT NULL,
    disk_mib       INTEGER NOT NULL,
    machine        TEXT,
    metadata       TEXT NOT NULL,
    env            BLOB NOT NULL,     -- sealed: people put secrets there
    created_ms     INTEGER NOT NULL,
    started_ms     INTEGER,
    deadline_ms    INTEGER NOT NULL,
    ending         TEXT,              -- while `killing`: what it will have been; then: what it was
    ended_ms       INTEGER            -- set once final
) STRICT;

CREATE INDEX sandboxes_of_workspace ON sandboxes (workspace, sequence);
CREATE INDEX sandboxes_alive ON sandboxes (state) WHERE state NOT IN ('failed', 'gone');
CREATE INDEX sandboxes_ended ON sandboxes (ended_ms) WHERE ended_ms IS NOT NULL;

CREATE TABLE sandbox_labels (
    workspace TEXT NOT NULL,
    key       TEXT NOT NULL,
    value     TEXT NOT NULL,
    sandbox   INTEGER NOT NULL REFERENCES sandboxes (sequence) ON DELETE CASCADE,
    PRIMARY KEY (workspace, key, value, sandbox)
) STRICT, WITHOUT ROWID;

CREATE INDEX labels_of_sandbox ON sandbox_labels (sandbox);

-- Every change of state, written in the transaction that makes it.
CREATE TABLE sandbox_events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox  INTEGER NOT NULL REFERENCES sandboxes (sequence) ON DELETE CASCADE,
    at_ms    INTEGER NOT NULL,
    state    TEXT NOT NULL,
    ending   TEXT
) STRICT;

CREATE INDEX events_of_sandbox ON sandbox_events (sandbox, sequence);

-- `digest` is keyed: requests hold environment values that could be guessed from a plain hash.
CREATE TABLE idempotency_keys (
    workspace  TEXT NOT NULL REFERENCES workspaces (id),
    key        TEXT NOT NULL,
    digest     BLOB NOT NULL,
    sandbox    TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (workspace, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_ms);
