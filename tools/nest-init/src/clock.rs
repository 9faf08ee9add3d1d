//! The processor's clock, which KVM must not see before the kernel is sure of it.
//!
//! KVM takes the frequency of the time stamp counter when its module is loaded, and the kernel measures it anew
//! half a second later. Where both are more than 250 ppm apart, which is one boot in ten under emulation, a vCPU is
//! asked for with a frequency below the hardware's, and a processor without TSC scaling gets a multiplier of zero: its
//! timers then fire after the age of this machine instead of the time that was asked for.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{Fault, Naming};

const CURRENT: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// The measurement takes two seconds from power on.
const DEADLINE: Duration = Duration::from_secs(20);
/// `O_NONBLOCK`.
const NONBLOCK: i32 = 0o4000;

/// Waits until the kernel runs by the time stamp counter with its final frequency. Nothing but its log tells when that
/// is: each line is a reason to look.
pub fn wait_until_measured() -> Result<(), Fault> {
    let mut log = fs::File::options()
        .read(true)
        .custom_flags(NONBLOCK)
        .open("/dev/kmsg")
        .naming("open the kernel's log")?;
    let until = Instant::now() + DEADLINE;
    let mut line = [0; 8192];
    loop {
        let current = fs::read_to_string(CURRENT).naming("read the clock source")?;
        // Until then it is `tsc-early`, or another device.
        if current.trim() == "tsc" {
            return Ok(());
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let late = std::io::Error::from(ErrorKind::TimedOut);
            return Err(late).naming(format!(
                "wait for the clock source tsc, it is {}",
                current.trim()
            ));
        }
        let timeout = Timespec::try_from(left).map_err(std::io::Error::other);
        let timeout = timeout.naming("wait for the kernel's log")?;
        match poll(&mut [PollFd::new(&log, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).naming("wait for the kernel's log"),
        }
        loop {
            match log.read(&mut line) {
                Ok(1..) => {}
                // Lines were lost before they were read, which does not matter here.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Ok(0) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).naming("read the kernel's log"),
            }
        }
    }
}
