-- What a subject held when its row was last written: whoever goes on with the row counts that until it can look
-- again.
ALTER TABLE usage ADD COLUMN memory_seen INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN disk_seen INTEGER NOT NULL DEFAULT 0;
