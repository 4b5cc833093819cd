use std::{path::Path, sync::Arc};

use stockade_model::{Template, TemplateState};
use stockade_store::TemplateRecord;
use tracing::warn;

use crate::{Principal, Service, ServiceError, core::Core, create::remove_soon, error::store_error, pool::Kind};

impl Service {
    /// Makes a template usable, from the directory the engine made it in. A ready template of the same
    /// name is replaced. Repeatable.
    ///
    /// # Errors
    /// The engine does not accept the directory, or the store fails.
    pub async fn register_template(&self, template: Template, directory: &Path) -> Result<(), ServiceError> {
        let core = &self.handle.core;
        core.engine().check_template(directory).await?;
        let record = TemplateRecord { template, directory: directory.to_owned(), built: None };
        core.store().put_template(&record).await.map_err(store_error)?;
        for other in core.store().all_templates().await.map_err(store_error)? {
            if other.template.state != TemplateState::Ready {
                for machine in core.pool.remove(&Kind::Template(other.template.id.clone())) {
                    remove_soon(core, machine).await;
                }
            }
        }
        if record.template.state == TemplateState::Ready {
            core.pool.add_template(record.template, record.directory);
        }
        Ok(())
    }

    /// Templates the workspace can use.
    ///
    /// # Errors
    /// The store fails.
    pub async fn templates(&self, who: &Principal) -> Result<Vec<Template>, ServiceError> {
        let records = self.store().templates(&who.workspace).await.map_err(store_error)?;
        Ok(records.into_iter().map(|record| record.template).collect())
    }

    /// One template by name or id.
    ///
    /// # Errors
    /// There is none in the workspace's sight, or the store fails.
    pub async fn template(&self, who: &Principal, name_or_id: &str) -> Result<Template, ServiceError> {
        Ok(self.template_record(who, name_or_id).await?.template)
    }

    pub(crate) async fn template_record(&self, who: &Principal, name: &str) -> Result<TemplateRecord, ServiceError> {
        let found = self.store().template(&who.workspace, name).await.map_err(store_error)?;
        found.ok_or_else(|| ServiceError::TemplateNotFound { name: name.to_owned() })
    }

    /// Every template of every workspace, with its directory; for whoever builds and removes them.
    ///
    /// # Errors
    /// The store fails.
    pub async fn all_templates(&self) -> Result<Vec<TemplateRecord>, ServiceError> {
        self.store().all_templates().await.map_err(store_error)
    }
}

/// Keeps machines ready of every template the engine still accepts.
pub(crate) async fn fill_pool(core: &Arc<Core>) -> Result<(), ServiceError> {
    for record in core.store().all_templates().await.map_err(store_error)? {
        // What clients built is started from its snapshot on demand.
        if record.template.state != TemplateState::Ready || record.built.is_some() {
            continue;
        }
        match core.engine().check_template(&record.directory).await {
            Ok(()) => core.pool.add_template(record.template, record.directory),
            Err(error) => {
                let name = record.template.name;
                warn!(template = %record.template.id, name, error = &error as &dyn std::error::Error, "template cannot be used");
            }
        }
    }
    Ok(())
}
