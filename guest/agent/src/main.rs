//! The guest's init: runs workloads and streams their output over vsock.

use std::process::ExitCode;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior};
use vmm_agent::agent::{self, Limits};
use vmm_agent::cgroup::Cgroup2;
use vmm_agent::init::{self, modules, mounts};
use vmm_agent::log::Log;
use vmm_agent::platform::Guest;
use vmm_agent::sys::kernel;
use vmm_protocol::DownReason;

/// Descriptors that the agent may have: six for an exec, one for a session.
const DESCRIPTORS: u64 = 65_536;

fn main() -> ExitCode {
    if !rustix::process::getpid().is_init() {
        eprintln!("vmm-agent is the init of a vmm guest: it runs as process 1 and nowhere else");
        return ExitCode::from(125);
    }
    agent::report_panics(Log::kernel, init::power_off);
    let mut failures = mounts::mount_all();
    if let Err(error) = mounts::standard_descriptors() {
        failures.push(format!("cannot open /dev/null: {error}"));
    }
    let mut log = Log::kernel();
    for failure in failures {
        log.error(failure);
    }
    let (reason, message) = run(&mut log);
    log.info(format_args!("going down: {message}"));
    agent::last_words(reason, &message);
    init::power_off();
    ExitCode::FAILURE
}

fn run(log: &mut Log) -> (DownReason, String) {
    // The last process to be killed for memory: without it nobody could say what happened.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        log.error(format_args!(
            "cannot be exempted from the memory killer: {error}"
        ));
    }
    // A workload's child shares this memory until it has become its program, and may be the user of another workload by
    // then: that one may not look into it.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        log.error(format_args!("cannot be closed to debuggers: {error}"));
    }
    let descriptors = Rlimit {
        current: Some(DESCRIPTORS),
        maximum: Some(DESCRIPTORS),
    };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, descriptors) {
        log.error(format_args!("cannot raise the descriptor limit: {error}"));
    }
    modules::load_all(log);
    if let Err(error) = kernel::loopback_up() {
        log.error(format_args!(
            "cannot bring the loopback interface up: {error}"
        ));
    }
    if let Err(error) = mounts::show_cgroups() {
        log.error(format_args!("cannot show cgroups to workloads: {error}"));
    }
    let hierarchy = match mounts::cgroup_tree().and_then(Cgroup2::new) {
        Ok(hierarchy) => hierarchy,
        Err(error) => return (DownReason::Failed, format!("cannot use cgroups: {error}")),
    };
    let memory = u64::from(rustix::system::sysinfo().mem_unit)
        .saturating_mul(rustix::system::sysinfo().totalram);
    match agent::run(Guest::new(hierarchy), Limits::for_memory(memory), log) {
        Ok(()) => (DownReason::PowerOff, "told to".to_owned()),
        Err(error) => (DownReason::Failed, error.to_string()),
    }
}
