-- Templates built by clients: a snapshot over the template they were built from, whose files are in `directory`.
ALTER TABLE templates ADD COLUMN snapshot TEXT;
ALTER TABLE templates ADD COLUMN build TEXT;

-- Several builds of one name are usable at once; tags say which is meant.
DROP INDEX ready_template_names;
CREATE UNIQUE INDEX ready_template_names ON templates (coalesce(workspace, ''), name)
    WHERE state = 'ready' AND snapshot IS NULL;
CREATE UNIQUE INDEX template_builds ON templates (build) WHERE build IS NOT NULL;

CREATE TABLE template_tags (
    workspace  TEXT NOT NULL REFERENCES workspaces (id),
    name       TEXT NOT NULL,
    tag        TEXT NOT NULL,
    template   TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (workspace, name, tag)
) STRICT, WITHOUT ROWID;

CREATE INDEX tags_of_template ON template_tags (template);

-- What a snapshot is for: `kept` ones are their owner's, `template` ones belong to a template, `step` ones are
-- what a build goes on from when it is run again.
ALTER TABLE snapshots ADD COLUMN purpose TEXT NOT NULL DEFAULT 'kept';
