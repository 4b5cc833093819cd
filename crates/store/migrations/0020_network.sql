-- The network of a sandbox, or of a snapshot and what is made from it.
-- `settings`: the policy as its owner wrote it and the tokens that stand for secrets; sealed, as people write literal
-- header values. `names`: which address the guest was given for which name.
CREATE TABLE networks (
    subject  TEXT PRIMARY KEY,
    settings BLOB NOT NULL,
    names    TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TRIGGER networks_of_sandboxes AFTER DELETE ON sandboxes
BEGIN
    DELETE FROM networks WHERE subject = OLD.id;
END;

CREATE TRIGGER networks_of_snapshots AFTER DELETE ON snapshots
BEGIN
    DELETE FROM networks WHERE subject = OLD.id;
END;

-- What the gateway puts on the wire for guests. `value` is sealed; older versions are not kept.
CREATE TABLE secrets (
    workspace  TEXT NOT NULL REFERENCES workspaces (id),
    name       TEXT NOT NULL,
    version    INTEGER NOT NULL,
    hosts      TEXT NOT NULL,
    value      BLOB NOT NULL,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    PRIMARY KEY (workspace, name)
) STRICT, WITHOUT ROWID;

-- One row per decision of the gateway; `record` is the JSON line.
CREATE TABLE audit (
    sequence  INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms     INTEGER NOT NULL,
    workspace TEXT NOT NULL,
    sandbox   TEXT NOT NULL,
    kind      TEXT NOT NULL,
    verdict   TEXT NOT NULL,
    record    TEXT NOT NULL
) STRICT;

CREATE INDEX audit_of_workspace ON audit (workspace, sequence);
CREATE INDEX audit_of_sandbox ON audit (sandbox, sequence);
CREATE INDEX audit_by_time ON audit (at_ms);
