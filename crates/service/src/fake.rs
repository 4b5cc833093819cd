//! A service over the fake engine: no machine, no wall. For tests, here and in the crates above, and for servers that
//! clients' own test suites run against.

use std::{collections::BTreeMap, error::Error, path::Path, sync::Arc};

use stockade_engine::fake::{FakeEngine, FakeHost, make_template};
use stockade_model::{MachineShape, Secret, Template, TemplateId, TemplateState};
use stockade_store::{Archive, SecretFile, Store};

use crate::{Service, ServiceConfig};

type Failed = Box<dyn Error + Send + Sync>;

/// Serves what is in `directory`, with its machines on `host` and without a pool; `configure` has the last word.
///
/// # Errors
/// The directory cannot be used, or the service does not start.
pub async fn serve(
    directory: &Path,
    host: &FakeHost,
    configure: impl FnOnce(&mut ServiceConfig),
) -> Result<(Service, Store), Failed> {
    let secret = SecretFile::open_or_create(&directory.join("secret"))?;
    let store = Store::open(&directory.join("stockade.db"), secret).await?;
    let mut config = ServiceConfig::new(Arc::new(FakeEngine::new(host.clone())), store.clone());
    config.pool_size = 0;
    config.archive = Some(Archive::at_directory(&directory.join("archive"))?);
    configure(&mut config);
    Ok((Service::start(config).await?, store))
}

/// Everyone's template of this name, small and without an environment.
pub fn template(name: &str) -> Template {
    Template {
        id: TemplateId::random(),
        workspace: None,
        name: name.to_owned(),
        state: TemplateState::Ready,
        shape: MachineShape { vcpus: 1, memory_mib: 512, disk_mib: 1024 },
        recipe_digest: "none".to_owned(),
        env: BTreeMap::new(),
        default_user: "root".to_owned(),
        default_cwd: None,
        created_at: jiff::Timestamp::now(),
    }
}

/// Lets sandboxes be made from a template, whose files are made in `directory`.
///
/// # Errors
/// They cannot be made, or the template is refused.
pub async fn register(service: &Service, directory: &Path, template: Template) -> Result<(), Failed> {
    let files = make_template(directory.join("templates").join(template.id.as_str()))?;
    Ok(service.register_template(template, &files).await?)
}

/// A new key to the workspace of this name, which is made if there is none.
///
/// # Errors
/// The store fails.
pub async fn key(service: &Service, workspace: &str) -> Result<Secret, Failed> {
    let workspace = service.workspace(workspace).await?;
    Ok(service.create_api_key(&workspace, "test").await?.1)
}
