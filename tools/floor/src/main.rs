//! The least that a program can do to see a guest's first byte: what boot times are compared with.
//!
//! `floor [GUEST.elf [COMMAND LINE]]` creates a machine with 128 MiB, starts the guest (a fast guest that
//! writes one byte, by default), copies its serial port to stdout and leaves when it powers off. It has no
//! device, no thread, no option and checks only what would crash it.
#![allow(unsafe_code)] // One call: telling KVM of memory that this process has mapped.

mod elf;
mod entry;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::{env, fs, io};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const MEMORY: usize = 128 << 20;
const SERIAL: u16 = 0x3f8;
/// Where `vmm` has its ACPI sleep control register.
const SLEEP_CONTROL: u16 = 0x600;
const KEYBOARD_CONTROLLER: u16 = 0x64;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("floor: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let guest = match arguments.next() {
        Some(path) => fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?,
        None => vmm_guests::SERIAL.to_vec(),
    };
    let command_line = arguments.next().unwrap_or_default();

    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)])?;
    let start = elf::load(&guest, &memory)?;
    memory.write_slice(command_line.as_encoded_bytes(), entry::COMMAND_LINE)?;
    entry::write_tables(&memory)?;

    let kvm = Kvm::new().map_err(|e| format!("/dev/kvm: {e}"))?;
    let vm = machine(&kvm, &memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    entry::set_registers(&vcpu, start)?;
    follow(&mut vcpu)
}

fn machine(kvm: &Kvm, memory: &GuestMemoryMmap<()>) -> Result<VmFd, Box<dyn Error>> {
    let vm = kvm.create_vm()?;
    let slot = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: memory.get_host_address(GuestAddress(0))? as u64,
    };
    // The slot comes before the irqchip: with one in place the kernel waits a grace period (6 ms).
    // SAFETY: the range is one mapping of `memory`, which outlives the machine in `run`.
    unsafe { vm.set_user_memory_region(slot)? };
    vm.set_tss_address(0xfffb_d000)?;
    vm.create_irq_chip()?;
    vm.create_pit2(kvm_pit_config::default())?;
    Ok(vm)
}

fn follow(vcpu: &mut VcpuFd) -> Result<(), Box<dyn Error>> {
    let mut stdout = io::stdout();
    loop {
        match vcpu.run()? {
            VcpuExit::IoOut(SERIAL, data) => {
                stdout.write_all(data)?;
                stdout.flush()?;
            }
            VcpuExit::IoOut(SLEEP_CONTROL, _) => return Ok(()),
            VcpuExit::IoOut(KEYBOARD_CONTROLLER, [0xfe]) => return Err("the guest reset".into()),
            VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {}
            VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => data.fill(0xff),
            other => return Err(format!("the guest ended by {other:?}").into()),
        }
    }
}
