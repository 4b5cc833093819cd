//! The emulator's command line, from what a machine is to what QEMU wants to read. No I/O here.
//!
//! A restored machine must have the devices of the template it comes from, in the same order: both
//! come from [`arguments`], which differ only in how memory is mapped and where the machine comes from.
//!
//! Names inside the jail are fixed (`/machine`, `/layers`, `/template`, `/boot`), because a running
//! emulator knows its files by them.

use std::os::fd::RawFd;

use stockade_model::{Accelerator, MachineShape};
use stockade_wire::network;

use super::{
    layers::{DiskChain, LayerId},
    manifest::DISK,
    memory,
};

/// Where what a machine may write to is in the jail.
pub(crate) const MACHINE_DIR: &str = "/machine";
/// Where the layers of its disk are in the jail.
pub(crate) const LAYERS_DIR: &str = "/layers";
/// Where the template's directory is in the jail.
pub(crate) const TEMPLATE_DIR: &str = "/template";
/// Where the firmware is in the jail.
pub(crate) const FIRMWARE_DIR: &str = "/firmware";
/// Where kernel and initial file system are in the jail, at the boot of a template.
pub(crate) const BOOT_DIR: &str = "/boot";
/// The kernel there.
pub(crate) const KERNEL: &str = "vmlinuz";
/// The initial file system there.
pub(crate) const INITRAMFS: &str = "initramfs";
/// The machine type; part of what a template needs.
pub(crate) const MACHINE_TYPE: &str = "microvm";
/// Block node of the template's disk.
pub(crate) const TEMPLATE_NODE: &str = "template";
/// The root disk, for commands that name it.
pub(crate) const ROOT_DEVICE: &str = "root-disk";
/// The port of the guest link.
pub(crate) const LINK_PORT: &str = "stockade.link";

/// Seccomp: QEMU's own filter, everything it can forbid.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// One emulator's machine.
#[derive(Clone, Debug)]
pub(crate) struct MachineArguments<'a> {
    /// Shown by `ps`; lets a sweep recognise the process.
    pub(crate) name: &'a str,
    /// Processors and memory.
    pub(crate) shape: MachineShape,
    /// What runs the instructions.
    pub(crate) accelerator: Accelerator,
    /// The root disk.
    pub(crate) disk: &'a RootDisk,
    /// Where firmware is, as seen by the emulator.
    pub(crate) firmware: &'a str,
    /// Guest memory.
    pub(crate) memory: RawFd,
    /// Listening socket of the control channel.
    pub(crate) control: RawFd,
    /// Listening socket of the guest link.
    pub(crate) link: RawFd,
    /// Listening socket of the guest's console.
    pub(crate) console: RawFd,
    /// Listening socket of the guest's NIC.
    pub(crate) network: RawFd,
    /// Where the machine comes from.
    pub(crate) origin: Origin<'a>,
    /// Turn QEMU's seccomp filter on (always, but for the bare side of the benchmark).
    pub(crate) seccomp: bool,
}

/// Where a machine comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin<'a> {
    /// From its kernel.
    Boot {
        /// The kernel's command line.
        kernel_command_line: &'a str,
        /// Writes to memory go to the memory file; else they stay private.
        keeps_memory: bool,
    },
    /// From what a template or a snapshot keeps, loaded on command; writes to memory stay private. The kernel is in
    /// memory already.
    Saved,
}

/// The layers of a root disk, the lowest first.
#[derive(Clone, Debug)]
pub(crate) struct RootDisk {
    /// Layers that are not written to. The lowest may have more below it: what its header names.
    pub(crate) lower: Vec<Layer>,
    /// The one that is.
    pub(crate) top: Layer,
}

/// One layer of a root disk.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    /// Its block node's name.
    pub(crate) node: String,
    /// Its file, as the emulator sees it.
    pub(crate) path: String,
    /// The raw file below it, where that is not the one its header names.
    pub(crate) raw_below: Option<String>,
}

impl RootDisk {
    /// A machine's layers over its template's disk.
    pub(crate) fn of_machine(chain: &DiskChain) -> Self {
        let layer = |node: String, path: String| Layer { node, path, raw_below: None };
        let template = layer(TEMPLATE_NODE.to_owned(), format!("{TEMPLATE_DIR}/{DISK}"));
        let frozen = chain.frozen.iter().map(|frozen| layer(frozen.id.node(), frozen_layer_path(&frozen.id)));
        let lower = std::iter::once(template).chain(frozen).collect();
        Self { lower, top: layer(chain.own.node(), own_layer_path(&chain.own)) }
    }

    /// One layer, whatever its header names below it.
    pub(crate) fn of_file(path: &str) -> Self {
        let top = Layer { node: TEMPLATE_NODE.to_owned(), path: path.to_owned(), raw_below: None };
        Self { lower: Vec::new(), top }
    }
}

/// Where a layer that is not written to any more is in the jail.
pub(crate) fn frozen_layer_path(layer: &LayerId) -> String {
    format!("{LAYERS_DIR}/{}", layer.file_name())
}

/// Where the layer a machine writes to is in the jail.
pub(crate) fn own_layer_path(layer: &LayerId) -> String {
    format!("{MACHINE_DIR}/{}", layer.file_name())
}

/// The processor model; part of what a template needs.
///
/// An emulated processor that says its string instructions were fast (`erms`, `fsrm`) is taken at its word: the guest's
/// kernel then clears and copies all memory byte by byte, and the emulator goes round a loop for each of them. Else it
/// takes eight at a time, and programs take what they have for wider registers.
pub(crate) fn cpu_model(accelerator: Accelerator) -> &'static str {
    match accelerator {
        Accelerator::Kvm => "host",
        Accelerator::Tcg | Accelerator::None => "max,-erms,-fsrm",
    }
}

/// All arguments after the program's name.
pub(crate) fn arguments(machine: &MachineArguments<'_>) -> Vec<String> {
    let mut list = Vec::with_capacity(64);
    let mut add = |words: &[&str]| list.extend(words.iter().map(|word| (*word).to_owned()));

    add(&["-name", &format!("guest={}", machine.name)]);
    add(&["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    add(&["-machine", &format!("{MACHINE_TYPE},pit=off,memory-backend=memory")]);
    add(&["-accel", accelerator_argument(machine.accelerator)]);
    add(&["-cpu", cpu_model(machine.accelerator)]);
    add(&["-smp", &machine.shape.vcpus.to_string()]);
    add(&["-m", &format!("{}M", machine.shape.memory_mib)]);
    add(&["-L", machine.firmware]);

    let share = if matches!(machine.origin, Origin::Boot { keeps_memory: true, .. }) { "on" } else { "off" };
    add(&[
        "-object",
        &format!(
            "memory-backend-file,id=memory,size={}M,mem-path=/proc/self/fd/{},share={share}",
            machine.shape.memory_mib, machine.memory
        ),
    ]);

    let mut below = None;
    for layer in &machine.disk.lower {
        add(&["-blockdev", &block_node(layer, below, false)]);
        below = Some(layer);
    }
    add(&["-blockdev", &block_node(&machine.disk.top, below, true)]);
    let node = &machine.disk.top.node;
    add(&["-device", &format!("virtio-blk-device,id={ROOT_DEVICE},drive={node},serial=root")]);

    add(&["-chardev", &format!("socket,id=link,fd={},server=on,wait=off", machine.link)]);
    add(&["-device", "virtio-serial-device,id=ports,max_ports=4"]);
    add(&["-device", &format!("virtserialport,id=link-port,bus=ports.0,nr=1,chardev=link,name={LINK_PORT}")]);

    add(&["-object", "rng-builtin,id=random"]);
    add(&["-device", "virtio-rng-device,id=random-device,rng=random"]);

    // While nobody is connected, what the guest sends is dropped.
    add(&["-netdev", &format!("stream,id=network,server=on,addr.type=fd,addr.str={}", machine.network)]);
    let (mac, mtu) = (mac_address(network::GUEST_MAC), network::MTU);
    // A machine that goes on is where it was and has nobody to tell that it has moved. (`announce-rounds` 0 would do for
    // saved machines, too, but QEMU 7.2 then falls when the guest powers off.)
    let settings = format!("mac={mac},host_mtu={mtu},guest_announce=off");
    add(&["-device", &format!("virtio-net-device,id=network-device,netdev=network,{settings}")]);

    // While nobody is connected, what the guest prints is dropped: it cannot fill anything.
    add(&["-chardev", &format!("socket,id=console,fd={},server=on,wait=off", machine.console)]);
    add(&["-serial", "chardev:console"]);

    add(&["-chardev", &format!("socket,id=control,fd={},server=on,wait=off", machine.control)]);
    add(&["-mon", "chardev=control,mode=control"]);
    // What describes the machine as a whole is in its manifest; a snapshot's devices are written without it.
    add(&["-global", "migration.send-configuration=off"]);

    match machine.origin {
        Origin::Boot { kernel_command_line, .. } => {
            add(&["-kernel", &format!("{BOOT_DIR}/{KERNEL}"), "-initrd", &format!("{BOOT_DIR}/{INITRAMFS}")]);
            add(&["-append", kernel_command_line]);
        }
        Origin::Saved => add(&["-S", "-incoming", "defer"]),
    }
    if machine.seccomp {
        add(&["-sandbox", SANDBOX]);
    }
    list
}

/// Over everything a machine is made of besides its shape, its files and the host's clock: devices, their
/// order and settings, and what its kernel is told. A saved machine fits only where this is the same.
pub(crate) fn hardware_digest(accelerator: Accelerator) -> String {
    let kernel_command_line = kernel_command_line(accelerator, 0);
    let words = arguments(&MachineArguments {
        name: "",
        shape: MachineShape { vcpus: 1, memory_mib: 1, disk_mib: 1 },
        accelerator,
        disk: &RootDisk::of_file(""),
        firmware: FIRMWARE_DIR,
        memory: 0,
        control: 0,
        link: 0,
        console: 0,
        network: 0,
        origin: Origin::Boot { kernel_command_line: &kernel_command_line, keeps_memory: true },
        seccomp: true,
    });
    memory::bytes_digest(words.join("\0").as_bytes())
}

fn mac_address(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn accelerator_argument(accelerator: Accelerator) -> &'static str {
    match accelerator {
        Accelerator::Kvm => "kvm",
        // `tb-size` bounds the translator's memory, which else takes a share of the host's.
        Accelerator::Tcg | Accelerator::None => "tcg,thread=multi,tb-size=64",
    }
}

/// A layer over the one below it.
fn block_node(layer: &Layer, below: Option<&Layer>, is_writable: bool) -> String {
    let mut text = format!("driver=qcow2,node-name={},file.driver=file", layer.node);
    text += &format!(",file.filename={}", escape(&layer.path));
    // `discard=unmap`: what the guest trims is freed in its own layer.
    text += if is_writable { ",discard=unmap,file.discard=unmap" } else { ",read-only=on" };
    if let Some(below) = below {
        text += &format!(",backing={}", below.node);
    }
    if let Some(raw) = &layer.raw_below {
        text += ",backing.driver=raw,backing.file.driver=file";
        text += &format!(",backing.file.filename={}", escape(raw));
    }
    text
}

/// In QEMU's option lists a comma in a value is written twice.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

/// The guest kernel's command line. `tsc_khz`: speed of the host's time stamp counter.
///
/// Without the clock settings an emulated kernel measures its clocks against each other while the
/// host is busy with something else, finds them unstable and may hang for ever. The rest of what an emulated
/// kernel is told saves two thirds of the work of starting a program: with random addresses QEMU translates
/// the same code anew for every process; an emulated processor does not speculate, so there is nothing to
/// mitigate; pages are cleared when they are handed to a program, as they are anyway, not also when the
/// kernel takes them for itself; and nobody in the guest reads its statistics of stalls, for which an idle kernel
/// wakes every second.
pub(crate) fn kernel_command_line(accelerator: Accelerator, tsc_khz: u64) -> String {
    // A panic reboots at once, which `-no-reboot` turns into the machine's end.
    let common = "console=ttyS0 quiet panic=-1 reboot=t rdinit=/init";
    match accelerator {
        Accelerator::Kvm => common.to_owned(),
        Accelerator::Tcg | Accelerator::None => {
            let loops_per_jiffy = tsc_khz * 1000 / GUEST_HZ;
            let clocks = format!("tsc=reliable no_timer_check tsc_early_khz={tsc_khz} lpj={loops_per_jiffy}");
            format!("{common} {clocks} norandmaps mitigations=off init_on_alloc=0 psi=0")
        }
    }
}

/// The kernel's command line where it shall only show that it runs.
pub(crate) const PROBE_COMMAND_LINE: &str = "console=ttyS0 earlyprintk=ttyS0 panic=-1 reboot=t rdinit=/init";

/// Timer ticks a second of the guest's kernel (Debian's `CONFIG_HZ`).
const GUEST_HZ: u64 = 250;

#[cfg(test)]
mod tests {
    use super::*;

    fn example(origin: Origin<'_>) -> Vec<String> {
        arguments(&MachineArguments {
            name: "stockade",
            shape: MachineShape { vcpus: 2, memory_mib: 512, disk_mib: 1024 },
            accelerator: Accelerator::Tcg,
            disk: &RootDisk::of_machine(&DiskChain::new(&[]).expect("random")),
            firmware: FIRMWARE_DIR,
            memory: 10,
            control: 11,
            link: 12,
            console: 13,
            network: 14,
            origin,
            seccomp: true,
        })
    }

    fn devices(arguments: &[String]) -> Vec<&String> {
        arguments.windows(2).filter(|pair| pair[0] == "-device").map(|pair| &pair[1]).collect()
    }

    #[test]
    fn a_restored_machine_has_the_devices_of_the_booted_one_in_the_same_order() {
        let devices = |origin| -> Vec<String> {
            let arguments = example(origin);
            let devices = devices(&arguments).into_iter().map(|word| word.split(",drive=").next().expect("a word"));
            devices.map(str::to_owned).collect()
        };
        let booted = devices(Origin::Boot { kernel_command_line: "console=ttyS0", keeps_memory: true });
        assert_eq!(booted, devices(Origin::Saved));
        assert!(booted.len() <= 8, "microvm has 8 slots");
    }

    #[test]
    fn only_a_booting_machine_writes_to_the_memory_it_is_given() {
        let memory = |list: Vec<String>| list.into_iter().find(|word| word.starts_with("memory-backend-file"));
        let boot = |keeps_memory| Origin::Boot { kernel_command_line: "", keeps_memory };
        assert!(memory(example(boot(true))).expect("has memory").ends_with("share=on"));
        for origin in [boot(false), Origin::Saved] {
            assert!(memory(example(origin)).expect("has memory").ends_with("share=off"));
        }
    }

    #[test]
    fn no_device_can_punch_holes_into_shared_memory() {
        for word in example(Origin::Saved) {
            assert!(!word.contains("balloon") && !word.contains("virtio-mem"), "{word}");
        }
    }

    #[test]
    fn an_emulated_kernel_is_told_its_clocks() {
        let line = kernel_command_line(Accelerator::Tcg, 2_100_000);
        assert!(line.contains("tsc_early_khz=2100000") && line.contains("lpj=8400000"), "{line}");
        assert!(!kernel_command_line(Accelerator::Kvm, 2_100_000).contains("tsc"));
    }
}
