-- An id that no later secret of the same name has, and labels of the owner's.
ALTER TABLE secrets ADD COLUMN id TEXT NOT NULL DEFAULT '';
ALTER TABLE secrets ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}';
UPDATE secrets SET id = 'sec_' || lower(hex(randomblob(13)));
CREATE UNIQUE INDEX secrets_by_id ON secrets (id);
