-- How a sandbox lives on without being asked, where it is kept while it does not run, and where it comes from.
ALTER TABLE sandboxes ADD COLUMN lifetime_ms INTEGER NOT NULL DEFAULT 300000;
ALTER TABLE sandboxes ADD COLUMN remaining_ms INTEGER;
ALTER TABLE sandboxes ADD COLUMN tier TEXT;
ALTER TABLE sandboxes ADD COLUMN saved TEXT;
ALTER TABLE sandboxes ADD COLUMN idle_since_ms INTEGER;
ALTER TABLE sandboxes ADD COLUMN rules TEXT NOT NULL DEFAULT
    '{"on_timeout":"kill","auto_resume":false,"idle":{"standby_after":null,"hibernate_after":null,"delete_after":null}}';
ALTER TABLE sandboxes ADD COLUMN lineage TEXT NOT NULL DEFAULT '{"snapshot":null,"parent":null,"fork_index":null}';

ALTER TABLE sandbox_events ADD COLUMN tier TEXT;

-- `state`: `creating` and `deleting` ones are removed by the next server; their directories too.
CREATE TABLE snapshots (
    sequence       INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT NOT NULL UNIQUE,
    workspace      TEXT NOT NULL REFERENCES workspaces (id),
    name           TEXT,
    labels         TEXT NOT NULL,
    state          TEXT NOT NULL,
    sandbox        TEXT NOT NULL,
    parent         TEXT,
    template       TEXT NOT NULL,
    template_name  TEXT NOT NULL,
    vcpus          INTEGER NOT NULL,
    memory_mib     INTEGER NOT NULL,
    disk_mib       INTEGER NOT NULL,
    has_memory     INTEGER NOT NULL,
    memory_bytes   INTEGER NOT NULL,
    disk_bytes     INTEGER NOT NULL,
    paused_us      INTEGER NOT NULL,
    env            BLOB NOT NULL,     -- sealed, as a sandbox's
    created_ms     INTEGER NOT NULL,
    expires_ms     INTEGER
) STRICT;

CREATE INDEX snapshots_of_workspace ON snapshots (workspace, sequence);
CREATE INDEX snapshots_of_sandbox ON snapshots (sandbox);
CREATE INDEX snapshots_by_template ON snapshots (template);
CREATE INDEX snapshots_by_expiry ON snapshots (expires_ms) WHERE expires_ms IS NOT NULL;

CREATE TABLE snapshot_labels (
    workspace TEXT NOT NULL,
    key       TEXT NOT NULL,
    value     TEXT NOT NULL,
    snapshot  INTEGER NOT NULL REFERENCES snapshots (sequence) ON DELETE CASCADE,
    PRIMARY KEY (workspace, key, value, snapshot)
) STRICT, WITHOUT ROWID;

CREATE INDEX labels_of_snapshot ON snapshot_labels (snapshot);

-- Whose the usage is; outlives the sandbox's record.
CREATE TABLE metered (
    sandbox       TEXT PRIMARY KEY,
    workspace     TEXT NOT NULL,
    template_name TEXT NOT NULL,
    metadata      TEXT NOT NULL
) STRICT;

CREATE INDEX metered_of_workspace ON metered (workspace);

-- What one subject (a sandbox, or a snapshot of it) used in one stretch of one state, at most an hour long.
-- Numbers are totals of the row, written again as it grows: writing one twice changes nothing.
-- `cpu_seen` is the machine's own counter when the row was last written.
CREATE TABLE usage (
    subject          TEXT NOT NULL,
    sequence         INTEGER NOT NULL,
    sandbox          TEXT NOT NULL,
    state            TEXT NOT NULL,
    from_ms          INTEGER NOT NULL,
    to_ms            INTEGER NOT NULL,
    machine          TEXT,
    cpu_seen         INTEGER NOT NULL,
    cpu_micros       INTEGER NOT NULL,
    memory_byte_ms   INTEGER NOT NULL,
    disk_byte_ms     INTEGER NOT NULL,
    snapshot_byte_ms INTEGER NOT NULL,
    egress_bytes     INTEGER NOT NULL,
    PRIMARY KEY (subject, sequence)
) STRICT, WITHOUT ROWID;

CREATE INDEX usage_of_sandbox ON usage (sandbox, from_ms);
CREATE INDEX usage_by_time ON usage (to_ms);
