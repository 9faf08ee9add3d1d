//! A sandbox that nobody uses: its monitor does nothing at all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

use std::time::Duration;

use vmm_guests::ports;
use vmm_tests::{Client, Sandbox};

/// How long nothing has to happen: longer than any deadline or interval that one might have left running.
const WINDOW: Duration = Duration::from_secs(10);

#[test]
fn ev02_the_monitor_of_an_idle_sandbox_does_not_run_for_ten_seconds() {
    let sandbox = Sandbox::start("");
    let monitor = sandbox.monitor();
    let socket = sandbox.socket();
    let use_it = || {
        let (mut client, _) = Client::connect(&socket, "CONNECT 7\n").unwrap();
        client.check_echo(b"in use");
        client.finish();
        assert!(client.rest().is_empty());
    };
    assert_eq!(ports::ECHO, 7);
    // A sandbox that has been used: all that this has left behind is at rest, too.
    use_it();
    let before = monitor.metrics_with(|metrics| metrics["vsock"]["connections"] == 0);
    monitor.assert_idle(WINDOW);

    // The same measures see it in use.
    let threads = monitor.switches();
    use_it();
    let after = monitor.metrics_with(|metrics| metrics["vsock"]["connections"] == 0);
    for (of, name) in [("devices", "wakeups"), ("supervisor", "wakeups")] {
        let count = |metrics: &serde_json::Value| metrics[of][name].as_u64().unwrap();
        assert!(count(&after) > count(&before), "{of}: {before} {after}");
    }
    assert_ne!(monitor.switches(), threads);
}
