-- Public keys that open sandboxes of a workspace over SSH. With `sandbox` a key opens that one alone; with
-- `expires_ms` until then.
CREATE TABLE ssh_keys (
    id          TEXT PRIMARY KEY,
    workspace   TEXT NOT NULL REFERENCES workspaces (id),
    name        TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    public_key  TEXT NOT NULL,
    sandbox     TEXT,
    created_ms  INTEGER NOT NULL,
    expires_ms  INTEGER,
    UNIQUE (workspace, fingerprint)
) STRICT;
