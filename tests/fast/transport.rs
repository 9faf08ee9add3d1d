//! The virtio-mmio transport against a driver that does what no driver should.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use vmm::exits::ExitReason;
use vmm_tests::{FENCE, InProcess};

#[test]
fn wrong_order_live_queue_changes_wild_widths_and_resets_harm_nothing() {
    let guest = InProcess::boot_with_vsock(vmm_guests::TRANSPORT, "", FENCE);
    assert_eq!(guest.end(), ExitReason::Shutdown);
    let console = guest.console.text();
    assert!(!console.contains("bad "), "{console}");
    assert!(console.ends_with("transport: 23 ok, 0 bad\n"), "{console}");
}

#[test]
fn ho07_unclaimed_addresses_beside_a_device_are_ignored_or_all_ones() {
    let guest = InProcess::boot_with_vsock(vmm_guests::NOISE, "", FENCE);
    assert_eq!(guest.end(), ExitReason::Shutdown);
    assert!(
        guest.console.text().ends_with(" 0 odd\n"),
        "{}",
        guest.console.text()
    );
}
