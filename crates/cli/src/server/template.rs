//! Makes sure that there is a `base` template of the present recipe.

use jiff::Timestamp;
use stockade_engine::Engine;
use stockade_images::{BootFiles, ImageError, Images, recipe_digest};
use stockade_model::{MachineShape, Template, TemplateId, TemplateState};
use stockade_service::{Service, ServiceError};
use stockade_store::TemplateRecord;

use super::{data_dir::DataDir, progress::Display};
use crate::failure::{Failure, chain};

const NAME: &str = "base";
/// Machines of the base template: room for a build or a test run of ordinary size.
const SHAPE: MachineShape = MachineShape { vcpus: 2, memory_mib: 512, disk_mib: 10 * 1024 };

/// Registers `base`: the one there is if nothing about it has changed, else a new one.
pub(super) async fn ensure_base(
    service: &Service,
    engine: &dyn Engine,
    images: &Images,
    boot: &BootFiles,
    data_dir: &DataDir,
    display: &Display,
) -> Result<(), Failure> {
    let disk = images.base_disk(boot.kernel(), display).await.map_err(image_failure)?;
    let recipe = recipe_digest(boot, &disk);
    for record in service.all_templates().await.map_err(service_failure)? {
        if is_current(&record, &recipe) && engine.check_template(&record.directory).await.is_ok() {
            return Ok(());
        }
    }
    let id = TemplateId::random();
    let directory = data_dir.join("templates").join(id.as_str());
    images.warm_template(engine, boot, &disk, SHAPE, &directory, display).await.map_err(image_failure)?;
    let template = Template {
        id,
        workspace: None,
        name: NAME.to_owned(),
        state: TemplateState::Ready,
        shape: SHAPE,
        recipe_digest: recipe,
        env: Default::default(),
        default_user: "user".to_owned(),
        default_cwd: None,
        created_at: Timestamp::now(),
    };
    service.register_template(template, &directory).await.map_err(service_failure)
}

fn is_current(record: &TemplateRecord, recipe: &str) -> bool {
    let template = &record.template;
    template.workspace.is_none()
        && template.name == NAME
        && template.state == TemplateState::Ready
        && template.shape == SHAPE
        && template.recipe_digest == recipe
}

/// What went wrong while images were made, with what to do about it.
pub(super) fn image_failure(error: ImageError) -> Failure {
    let failure = Failure::new("template_failed", chain(&error));
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure.hint("`stockade doctor` looks at everything this needs"),
    }
}

fn service_failure(error: ServiceError) -> Failure {
    Failure::new("template_failed", chain(&error))
}
