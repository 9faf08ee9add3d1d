//! The boot path, and how a machine ends, with fast guests in this process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use vmm::exits::ExitReason;
use vmm_tests::InProcess;

#[test]
fn a_fast_guest_boots_and_powers_off() {
    let guest = InProcess::boot(vmm_guests::SERIAL, "");
    assert_eq!(guest.end(), ExitReason::Shutdown);
    assert_eq!(guest.console.text(), "!");
}

#[test]
fn the_command_line_reaches_the_guest() {
    let guest = InProcess::boot(vmm_guests::ENDS, "first say=no say=hello end=poweroff last");
    assert_eq!(guest.end(), ExitReason::Shutdown);
    assert_eq!(guest.console.text(), "hello\n");
}

#[test]
fn ends_are_told_apart() {
    for (end, reason) in [
        ("poweroff", ExitReason::Shutdown),
        ("reset", ExitReason::Reset),
        ("triple", ExitReason::TripleFault),
        ("panic", ExitReason::Panic(None)),
    ] {
        let guest = InProcess::boot(vmm_guests::ENDS, &format!("say=bye end={end}"));
        assert_eq!(guest.end(), reason, "{end}");
        assert_eq!(guest.console.text(), "bye\n", "{end}");
    }
}

#[test]
fn a_guest_that_never_exits_is_stopped_at_once() {
    let guest = InProcess::boot(vmm_guests::ENDS, "say=spinning end=spin");
    guest.console.wait_for("spinning\n");
    guest.stop();
    assert_eq!(guest.end(), ExitReason::Stopped);
}

#[test]
fn machines_of_every_shape_boot() {
    for (memory, cpus) in [(128 << 20, 1), (128 << 20, 4), (4 << 30, 1), (6 << 30, 32)] {
        let guest = InProcess::boot_with(vmm_guests::SERIAL, |config| {
            config.memory = memory;
            config.cpus = cpus;
        });
        assert_eq!(
            guest.end(),
            ExitReason::Shutdown,
            "{memory} bytes, {cpus} vCPUs"
        );
        assert_eq!(guest.console.text(), "!");
    }
}

#[test]
fn ho07_every_unclaimed_address_in_every_width_is_ignored_or_all_ones() {
    let guest = InProcess::boot(vmm_guests::NOISE, "flood=20000 lines=50");
    assert_eq!(guest.end(), ExitReason::Shutdown);
    let console = guest.console.text();
    let last = console.lines().last().unwrap();
    assert!(
        last.starts_with("noise: ") && last.ends_with(" 0 odd"),
        "{last}"
    );
    assert_eq!(
        console.lines().count(),
        51,
        "no line of the console is lost"
    );
}
