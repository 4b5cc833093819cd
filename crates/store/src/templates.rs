use std::path::PathBuf;

use jiff::Timestamp;
use sqlx::sqlite::SqliteRow;
use stockade_model::{SnapshotId, Template, TemplateId, TemplateState, WorkspaceId};

use crate::{
    SnapshotPurpose, Store, StoreError,
    open::{BEGIN, to_the_end},
    rows::{get, id, instant, json, millis, optional_id, shape, signed, to_json},
};

/// What a name without a tag means.
pub const DEFAULT_TAG: &str = "default";

/// A template and where its files are.
#[derive(Clone, Debug)]
pub struct TemplateRecord {
    /// The template.
    pub template: Template,
    /// Its directory, as the engine takes it.
    pub directory: PathBuf,
    /// What was built over it.
    pub built: Option<Built>,
}

/// A template that a client built: a snapshot over the template whose directory it has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Built {
    /// The snapshot machines start from.
    pub snapshot: SnapshotId,
    /// The build's id, a UUID.
    pub build: String,
}

/// A name's tag and what it stands for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TemplateTag {
    /// The name.
    pub name: String,
    /// The tag.
    pub tag: String,
    /// The template.
    pub template: TemplateId,
    /// The template's build.
    pub build: String,
    /// Since when.
    pub created_at: Timestamp,
}

impl Store {
    /// Keeps a template. Registering one again (same id) updates it; a ready one replaces the ready one
    /// of its name.
    ///
    /// # Errors
    /// The database fails.
    pub async fn put_template(&self, record: &TemplateRecord) -> Result<(), StoreError> {
        let (store, record) = (self.clone(), record.clone());
        to_the_end(async move {
            let fail = || StoreError::database("keep a template");
            let template = &record.template;
            let workspace = template.workspace.as_ref().map(WorkspaceId::as_str);
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            if template.state == TemplateState::Ready && record.built.is_none() {
                sqlx::query(
                    "UPDATE templates SET state = 'replaced'
                     WHERE workspace IS ? AND name = ? AND state = 'ready' AND snapshot IS NULL AND id <> ?",
                )
                .bind(workspace)
                .bind(&template.name)
                .bind(template.id.as_str())
                .execute(&mut *tx)
                .await
                .map_err(fail())?;
            }
            sqlx::query(
                "INSERT OR REPLACE INTO templates (id, workspace, name, state, vcpus, memory_mib, disk_mib, recipe_digest,
                     env, default_user, default_cwd, directory, created_ms, snapshot, build)
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )
            .bind(template.id.as_str())
            .bind(workspace)
            .bind(&template.name)
            .bind(state_word(template.state))
            .bind(template.shape.vcpus)
            .bind(signed(template.shape.memory_mib))
            .bind(signed(template.shape.disk_mib))
            .bind(&template.recipe_digest)
            .bind(to_json(&template.env))
            .bind(&template.default_user)
            .bind(&template.default_cwd)
            .bind(record.directory.to_string_lossy())
            .bind(millis(template.created_at))
            .bind(record.built.as_ref().map(|built| built.snapshot.as_str()))
            .bind(record.built.as_ref().map(|built| built.build.as_str()))
            .execute(&mut *tx)
            .await
            .map_err(fail())?;
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// The template of an id, or the ready one of a name: by its tag `default` (another one: `name:tag`), else by
    /// its own name; a workspace's own before everyone's.
    ///
    /// # Errors
    /// The database fails.
    pub async fn template(
        &self,
        workspace: &WorkspaceId,
        name_or_id: &str,
    ) -> Result<Option<TemplateRecord>, StoreError> {
        let (name, tag) = name_or_id.split_once(':').unwrap_or((name_or_id, DEFAULT_TAG));
        sqlx::query(
            "SELECT templates.* FROM templates
             LEFT JOIN template_tags tags ON tags.template = templates.id AND tags.workspace = ?1
                 AND tags.name = ?3 AND tags.tag = ?4
             WHERE (templates.workspace = ?1 OR templates.workspace IS NULL)
                 AND (templates.id = ?2 OR tags.tag IS NOT NULL
                     OR (templates.name = ?2 AND state = 'ready' AND snapshot IS NULL))
             ORDER BY templates.workspace IS NULL LIMIT 1",
        )
        .bind(workspace.as_str())
        .bind(name_or_id)
        .bind(name)
        .bind(tag)
        .fetch_optional(&self.read)
        .await
        .map_err(StoreError::database("look up a template"))?
        .map(|row| template(&row))
        .transpose()
    }

    /// The ready templates a workspace can use, by name.
    ///
    /// # Errors
    /// The database fails.
    pub async fn templates(&self, workspace: &WorkspaceId) -> Result<Vec<TemplateRecord>, StoreError> {
        sqlx::query(
            "SELECT * FROM templates WHERE (workspace = ? OR workspace IS NULL) AND state = 'ready' ORDER BY name, id",
        )
        .bind(workspace.as_str())
        .fetch_all(&self.read)
        .await
        .map_err(StoreError::database("list templates"))?
        .iter()
        .map(template)
        .collect()
    }

    /// Every template of every workspace, for the server's own use.
    ///
    /// # Errors
    /// The database fails.
    pub async fn all_templates(&self) -> Result<Vec<TemplateRecord>, StoreError> {
        sqlx::query("SELECT * FROM templates ORDER BY created_ms, id")
            .fetch_all(&self.read)
            .await
            .map_err(StoreError::database("list templates"))?
            .iter()
            .map(template)
            .collect()
    }

    /// How often a template was used, as far as records go back, and when last.
    ///
    /// # Errors
    /// The database fails.
    pub async fn template_uses(
        &self,
        workspace: &WorkspaceId,
        template: &TemplateId,
    ) -> Result<(u64, Option<Timestamp>), StoreError> {
        let row = sqlx::query(
            "SELECT COUNT(*) AS uses, MAX(created_ms) AS last_ms FROM sandboxes WHERE workspace = ? AND template = ?",
        )
        .bind(workspace.as_str())
        .bind(template.as_str())
        .fetch_one(&self.read)
        .await
        .map_err(StoreError::database("count the uses of a template"))?;
        let last = get::<Option<i64>>(&row, "last_ms")?.map(|millis| instant(millis, "last_ms")).transpose()?;
        Ok((get::<i64>(&row, "uses")?.unsigned_abs(), last))
    }

    /// What has been built under a name, oldest first.
    ///
    /// # Errors
    /// The database fails.
    pub async fn templates_built(
        &self,
        workspace: &WorkspaceId,
        name: &str,
    ) -> Result<Vec<TemplateRecord>, StoreError> {
        sqlx::query(
            "SELECT * FROM templates WHERE workspace = ? AND name = ? AND snapshot IS NOT NULL ORDER BY created_ms, id",
        )
        .bind(workspace.as_str())
        .bind(name)
        .fetch_all(&self.read)
        .await
        .map_err(StoreError::database("list the builds of a template"))?
        .iter()
        .map(template)
        .collect()
    }

    /// Points tags of a name to a template; those that pointed elsewhere point there no longer.
    ///
    /// # Errors
    /// The database fails.
    pub async fn tag_template(
        &self,
        workspace: &WorkspaceId,
        name: &str,
        tags: &[String],
        template: &TemplateId,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let (store, workspace, name) = (self.clone(), workspace.clone(), name.to_owned());
        let (tags, template) = (tags.to_vec(), template.clone());
        to_the_end(async move {
            let fail = || StoreError::database("tag a template");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            for tag in &tags {
                sqlx::query(
                    "INSERT OR REPLACE INTO template_tags (workspace, name, tag, template, created_ms)
                     VALUES (?, ?, ?, ?, ?)",
                )
                .bind(workspace.as_str())
                .bind(&name)
                .bind(tag)
                .bind(template.as_str())
                .bind(millis(now))
                .execute(&mut *tx)
                .await
                .map_err(fail())?;
            }
            tx.commit().await.map_err(fail())
        })
        .await
    }

    /// Removes one tag of a name. False: there was none.
    ///
    /// # Errors
    /// The database fails.
    pub async fn untag_template(&self, workspace: &WorkspaceId, name: &str, tag: &str) -> Result<bool, StoreError> {
        let done = sqlx::query("DELETE FROM template_tags WHERE workspace = ? AND name = ? AND tag = ?")
            .bind(workspace.as_str())
            .bind(name)
            .bind(tag)
            .execute(&self.write)
            .await;
        done.map(|done| done.rows_affected() > 0).map_err(StoreError::database("remove a template's tag"))
    }

    /// A workspace's tags, by name and time.
    ///
    /// # Errors
    /// The database fails.
    pub async fn template_tags(&self, workspace: &WorkspaceId) -> Result<Vec<TemplateTag>, StoreError> {
        let rows = sqlx::query(
            "SELECT tags.name, tags.tag, tags.template, tags.created_ms, templates.build FROM template_tags tags
             JOIN templates ON templates.id = tags.template
             WHERE tags.workspace = ? ORDER BY tags.name, tags.created_ms, tags.tag",
        )
        .bind(workspace.as_str())
        .fetch_all(&self.read)
        .await
        .map_err(StoreError::database("list the tags of templates"))?;
        let tag = |row: &SqliteRow| {
            Ok(TemplateTag {
                name: get(row, "name")?,
                tag: get(row, "tag")?,
                template: id(row, "template")?,
                build: get::<Option<String>>(row, "build")?.unwrap_or_default(),
                created_at: instant(get(row, "created_ms")?, "created_ms")?,
            })
        };
        rows.iter().map(tag).collect()
    }

    /// Forgets templates, before their files are removed; all of them, or (false) none, as snapshots or living
    /// sandboxes need one. What builds have kept of their steps does not count. Repeatable.
    ///
    /// # Errors
    /// The database fails.
    pub async fn remove_templates(&self, ids: &[TemplateId]) -> Result<bool, StoreError> {
        let (store, ids) = (self.clone(), ids.to_vec());
        to_the_end(async move {
            let fail = || StoreError::database("remove a template");
            let mut tx = store.write.begin_with(BEGIN).await.map_err(fail())?;
            for id in &ids {
                let needed: bool = sqlx::query_scalar(
                    "SELECT EXISTS (SELECT 1 FROM snapshots WHERE template = ?1 AND state <> 'deleting' AND purpose <> ?2)
                         OR EXISTS (SELECT 1 FROM sandboxes WHERE template = ?1 AND state NOT IN ('failed', 'gone'))",
                )
                .bind(id.as_str())
                .bind(SnapshotPurpose::Step.as_str())
                .fetch_one(&mut *tx)
                .await
                .map_err(fail())?;
                if needed {
                    return Ok(false);
                }
                for statement in ["DELETE FROM templates WHERE id = ?", "DELETE FROM template_tags WHERE template = ?"]
                {
                    sqlx::query(statement).bind(id.as_str()).execute(&mut *tx).await.map_err(fail())?;
                }
            }
            tx.commit().await.map_err(fail())?;
            Ok(true)
        })
        .await
    }
}

fn state_word(state: TemplateState) -> &'static str {
    match state {
        TemplateState::Building => "building",
        TemplateState::Ready => "ready",
        TemplateState::Failed => "failed",
        TemplateState::Replaced => "replaced",
    }
}

fn template(row: &SqliteRow) -> Result<TemplateRecord, StoreError> {
    let workspace: Option<&str> = get(row, "workspace")?;
    let state: &str = get(row, "state")?;
    let states =
        [TemplateState::Building, TemplateState::Ready, TemplateState::Failed, TemplateState::Replaced].into_iter();
    let template = Template {
        id: id(row, "id")?,
        workspace: workspace.map(str::parse).transpose().map_err(|error| StoreError::damaged("workspace", error))?,
        name: get(row, "name")?,
        state: states
            .into_iter()
            .find(|known| state_word(*known) == state)
            .ok_or_else(|| StoreError::damaged("a template's state", state))?,
        shape: shape(row)?,
        recipe_digest: get(row, "recipe_digest")?,
        env: json(get::<&str>(row, "env")?.as_bytes(), "env")?,
        default_user: get(row, "default_user")?,
        default_cwd: get(row, "default_cwd")?,
        created_at: instant(get(row, "created_ms")?, "created_ms")?,
    };
    let built = optional_id(row, "snapshot")?.zip(get::<Option<String>>(row, "build")?);
    let built = built.map(|(snapshot, build)| Built { snapshot, build });
    Ok(TemplateRecord { template, directory: get::<String>(row, "directory")?.into(), built })
}
