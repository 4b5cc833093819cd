//! What a guest is told to be: in a sandbox, while it waits to be claimed, and when its template is made.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use stockade_model::{MachineId, Sandbox, Template};
use stockade_wire::machine::Identity;

use crate::{Service, ServiceConfig, core::Core, network::Told};

const ENTROPY_BYTES: usize = 48;
/// Tells a child which of its siblings it is.
const FORK_INDEX: &str = "STOCKADE_FORK_INDEX";
/// Names what is nobody's yet: a machine of this name takes another before it is anybody's.
const NOBODY: &str = "stockade-template";

impl Service {
    /// What a machine is told before its memory becomes a template's: the authority all machines trust and the files
    /// programs look for are then there, and each machine only has its own names to take.
    /// `user`: the one its commands run as.
    pub fn introduction(&self, user: &str) -> Identity {
        nobody(&self.handle.core, NOBODY, user, None)
    }
}

/// What a machine goes by while it waits for its sandbox.
pub(crate) fn in_waiting(core: &Core, machine: &MachineId, user: &str, directory: Option<&str>) -> Identity {
    let mut identity = nobody(core, machine.as_str(), user, directory);
    // So that this, too, has run once.
    identity.network.iter_mut().for_each(|network| network.reset_connections = true);
    identity
}

fn nobody(core: &Core, name: &str, user: &str, directory: Option<&str>) -> Identity {
    let network = core.network.as_ref().map(|network| network.for_guest());
    let files = &core.config.guest_files;
    Identity { network, ..named(core.clock().now(), files, (name, name, name), name, (user, directory)) }
}

/// What a sandbox's machine is told, each time it is made, resumed or copied.
pub(crate) fn identity(core: &Core, sandbox: &Sandbox, template: &Template, told: Told) -> Identity {
    identity_at(core.clock().now(), &core.config.guest_files, sandbox, template, told)
}

fn identity_at(
    now: Timestamp,
    files: &BTreeMap<String, String>,
    sandbox: &Sandbox,
    template: &Template,
    told: Told,
) -> Identity {
    let mut env = template.env.clone();
    env.extend(sandbox.env.clone());
    // Which of its siblings a child is: so that one command can do eight different things in eight children.
    if let Some(index) = sandbox.lineage.fork_index {
        env.insert(FORK_INDEX.to_owned(), index.to_string());
    }
    env.extend(told.env);
    let names = (sandbox.id.as_str(), template.id.as_str(), template.name.as_str());
    let secret = sandbox.access_token.expose();
    let defaults = (template.default_user.as_str(), template.default_cwd.as_deref());
    Identity { env, network: told.network, ..named(now, files, names, secret, defaults) }
}

/// What follows from names and moment alone: no environment, and nothing about the network.
fn named(
    now: Timestamp,
    files: &BTreeMap<String, String>,
    (sandbox, template, template_name): (&str, &str, &str),
    secret: &str,
    (user, directory): (&str, Option<&str>),
) -> Identity {
    Identity {
        sandbox_id: sandbox.to_owned(),
        template_id: template.to_owned(),
        hostname: sandbox.to_owned(),
        machine_id: machine_id(sandbox, secret),
        unix_time_ns: u64::try_from(now.as_nanosecond()).unwrap_or_default(),
        entropy: fresh_entropy(),
        env: BTreeMap::new(),
        default_user: user.to_owned(),
        default_cwd: directory.map(str::to_owned),
        files: filled(files, sandbox, template_name),
        network: None,
    }
}

fn filled(files: &BTreeMap<String, String>, sandbox: &str, template: &str) -> BTreeMap<String, String> {
    let fill = |text: &str| text.replace(ServiceConfig::SANDBOX, sandbox).replace(ServiceConfig::TEMPLATE, template);
    files.iter().map(|(path, text)| (path.clone(), fill(text))).collect()
}

/// The same whenever the sandbox's guest boots, and not to be guessed from its id: programs derive keys from it.
fn machine_id(id: &str, secret: &str) -> String {
    let digest = Sha256::new().chain_update("machine id\0").chain_update(id).chain_update("\0").chain_update(secret);
    let mut bytes: [u8; 16] = digest.finalize()[..16].try_into().expect("half a digest");
    // What systemd asks of it: a version 4 UUID.
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Random bytes for a guest's generator, as the agent takes them.
fn fresh_entropy() -> String {
    let mut entropy = [0; ENTROPY_BYTES];
    getrandom::fill(&mut entropy).expect("the kernel's random generator works once it is seeded");
    BASE64_STANDARD.encode(entropy)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use stockade_model::{
        LifeRules, Lineage, MachineShape, SandboxId, SandboxState, Secret, TemplateId, TemplateState, WorkspaceId,
    };

    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn an_identity_has_fresh_randomness_one_name_and_the_sandboxs_env() {
        let shape = MachineShape { vcpus: 1, memory_mib: 256, disk_mib: 1024 };
        let now: Timestamp = "2026-01-01T00:00:00.000000001Z".parse().expect("a time");
        let template = Template {
            id: TemplateId::random(),
            workspace: None,
            name: "base".to_owned(),
            state: TemplateState::Ready,
            shape,
            recipe_digest: String::new(),
            env: pairs(&[("A", "template"), ("B", "template")]),
            default_user: "user".to_owned(),
            default_cwd: None,
            created_at: now,
        };
        let sandbox = Sandbox {
            id: SandboxId::random(),
            workspace: WorkspaceId::random(),
            template: template.id.clone(),
            template_name: template.name.clone(),
            state: SandboxState::Creating,
            shape,
            machine: None,
            metadata: BTreeMap::new(),
            env: pairs(&[("B", "sandbox")]),
            access_token: Secret::new("token"),
            created_at: now,
            started_at: None,
            deadline: now,
            lifetime: Duration::from_secs(1),
            remaining: None,
            tier: None,
            saved: None,
            idle_since: None,
            rules: LifeRules::default(),
            lineage: Lineage::default(),
            ending: None,
        };
        let files = pairs(&[("/run/who", "{sandbox} of {template}")]);
        let identity = || identity_at(now, &files, &sandbox, &template, Told::default());
        let (one, other) = (identity(), identity());
        assert_ne!(one.entropy, other.entropy);
        assert!(BASE64_STANDARD.decode(&one.entropy).expect("base64").len() >= 32);
        assert_eq!(one.machine_id, other.machine_id);
        assert!(one.machine_id.len() == 32 && one.machine_id.bytes().all(|digit| digit.is_ascii_hexdigit()));
        assert_eq!(one.env, pairs(&[("A", "template"), ("B", "sandbox")]));
        assert_eq!((one.hostname, one.default_user), (sandbox.id.to_string(), "user".to_owned()));
        assert_eq!(one.files["/run/who"], format!("{} of {}", sandbox.id, template.name));
        assert_eq!(i128::from(one.unix_time_ns), now.as_nanosecond());

        // Who knows the id does not know what the machine calls itself.
        let twin = Sandbox { access_token: Secret::new("another"), ..sandbox.clone() };
        let child = Sandbox { id: SandboxId::random(), ..sandbox.clone() };
        for other in [twin, child] {
            let other = identity_at(now, &files, &other, &template, Told::default());
            assert_ne!(other.machine_id, one.machine_id);
        }
    }
}
