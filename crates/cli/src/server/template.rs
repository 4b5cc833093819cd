//! Makes sure that the server's own templates are there, each of its present recipe.

use jiff::Timestamp;
use stockade_engine::Engine;
use stockade_images::{BootFiles, ImageError, Images, Recipe, code_interpreter};
use stockade_model::{MachineShape, Template, TemplateId, TemplateState};
use stockade_service::{Service, ServiceError};

use super::{data_dir::DataDir, progress::Display};
use crate::{
    args::Extra,
    failure::{Failure, chain},
};

/// Whom our templates run commands as.
const USER: &str = "user";
/// Machines of the base template: room for a build or a test run of ordinary size.
const BASE_SHAPE: MachineShape = MachineShape { vcpus: 2, memory_mib: 512, disk_mib: 10 * 1024 };
/// Room for kernels and for the data they hold; as much as E2B's. What is not used costs nothing.
const CODE_SHAPE: MachineShape = MachineShape { vcpus: 2, memory_mib: 2048, disk_mib: 10 * 1024 };

/// Where templates are made.
pub(super) struct Workshop<'a> {
    pub(super) service: &'a Service,
    pub(super) engine: &'a dyn Engine,
    pub(super) images: &'a Images,
    pub(super) boot: &'a BootFiles,
    pub(super) data_dir: &'a DataDir,
    pub(super) display: &'a Display,
}

impl Workshop<'_> {
    /// Registers `base`: the one there is if nothing about it has changed, else a new one.
    pub(super) async fn ensure_base(&self) -> Result<(), Failure> {
        let disk = self.images.base_disk(self.boot.kernel(), self.display).await.map_err(image_failure)?;
        let introduction = self.service.introduction(USER);
        self.ensure("base", Recipe { disk, shape: BASE_SHAPE, introduction, startup: None }).await
    }

    /// The same for a template that is made only where it is asked for.
    pub(super) async fn ensure_extra(&self, extra: Extra) -> Result<(), Failure> {
        match extra {
            Extra::CodeInterpreter => {
                let disk = self.images.code_interpreter_disk(self.boot.kernel(), self.display).await;
                let disk = disk.map_err(image_failure)?;
                let startup = Some(code_interpreter::startup());
                let introduction = self.service.introduction(USER);
                self.ensure("code-interpreter", Recipe { disk, shape: CODE_SHAPE, introduction, startup }).await
            }
        }
    }

    async fn ensure(&self, name: &str, recipe: Recipe) -> Result<(), Failure> {
        let digest = recipe.digest(self.boot);
        for record in self.service.all_templates().await.map_err(service_failure)? {
            let template = &record.template;
            let is_current = template.workspace.is_none()
                && template.name == name
                && template.state == TemplateState::Ready
                && template.shape == recipe.shape
                && template.recipe_digest == digest;
            if is_current && self.engine.check_template(&record.directory).await.is_ok() {
                return Ok(());
            }
        }
        let id = TemplateId::random();
        let directory = self.data_dir.join("templates").join(id.as_str());
        let made = self.images.warm_template(self.engine, self.boot, &recipe, &directory, self.display).await;
        made.map_err(image_failure)?;
        let template = Template {
            id,
            workspace: None,
            name: name.to_owned(),
            state: TemplateState::Ready,
            shape: recipe.shape,
            recipe_digest: digest,
            env: Default::default(),
            default_user: USER.to_owned(),
            default_cwd: None,
            created_at: Timestamp::now(),
        };
        self.service.register_template(template, &directory).await.map_err(service_failure)
    }
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
