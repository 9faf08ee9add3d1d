//! A sandbox's monitor, seen from outside: its counters, its threads, its memory.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

use crate::patience;

/// A monitor's process and its control socket.
pub struct Monitor {
    pid: Pid,
    process: OwnedFd,
    control: PathBuf,
}

/// What its threads have done: how often each of them, vCPUs apart, has left its processor.
pub type Switches = BTreeMap<String, u64>;

impl Monitor {
    /// The monitor that `vmm inspect --json` tells of.
    ///
    /// # Panics
    /// When it does not run.
    pub fn of(inspected: &Value) -> Self {
        let pid = inspected["pid"].as_i64().unwrap();
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        Self {
            pid,
            process: pidfd_open(pid, PidfdFlags::empty()).unwrap(),
            control: inspected["sockets"]["control"].as_str().unwrap().into(),
        }
    }

    /// Its counters, as `vmm metrics --json` prints them, but for those of the agent: to tell them wakes the guest up.
    ///
    /// # Panics
    /// When it does not answer.
    pub fn metrics(&self) -> Value {
        let mut control = UnixStream::connect(&self.control).unwrap();
        control.set_read_timeout(Some(patience())).unwrap();
        let request = b"{\"v\":1,\"op\":\"metrics\",\"agent\":false}\n";
        control.write_all(request).unwrap();
        let mut line = String::new();
        BufReader::new(control).read_line(&mut line).unwrap();
        let mut answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["ok"], true, "{answer}");
        answer["result"].take()
    }

    /// Asks for its counters until they are as wanted; each look is a round trip through its supervisor.
    ///
    /// # Panics
    /// When they do not come to that in time.
    pub fn metrics_with(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + patience();
        loop {
            let metrics = self.metrics();
            if wanted(&metrics) {
                return metrics;
            }
            assert!(Instant::now() < end, "it stays at {metrics}");
        }
    }

    /// Resident memory of all its mappings but that of the guest, which has `guest` bytes.
    ///
    /// # Panics
    /// When it has gone.
    pub fn own_memory(&self, guest: u64) -> u64 {
        let smaps = self.read("smaps");
        let (mut own, mut is_guest) = (0, false);
        for line in smaps.lines() {
            let bytes = |name: &str| {
                let kib = line.strip_prefix(name)?.trim().strip_suffix(" kB")?;
                Some(kib.parse::<u64>().unwrap() * 1024)
            };
            if let Some(size) = bytes("Size:") {
                is_guest = size >= guest;
            } else if let Some(rss) = bytes("Rss:") {
                own += if is_guest { 0 } else { rss };
            }
        }
        own
    }

    /// Its threads' switches. A vCPU's are not counted: a guest that halts sleeps in the kernel, on its thread.
    ///
    /// # Panics
    /// When it has gone.
    pub fn switches(&self) -> Switches {
        let switches = |text: String| {
            let fields = text.lines().filter(|line| line.contains("ctxt_switches:"));
            let numbers = fields.map(|line| line.split_whitespace().last().unwrap());
            numbers.map(|number| number.parse::<u64>().unwrap()).sum()
        };
        self.threads()
            .map(|(id, name)| {
                let status = self.read(&format!("task/{id}/status"));
                (format!("{name} {id}"), switches(status))
            })
            .collect()
    }

    /// Lets `window` pass, in which nobody uses the sandbox.
    ///
    /// # Panics
    /// When a thread of the monitor but a vCPU's has run in it, a vCPU has come back from the guest, or the device
    /// loop has woken up.
    pub fn assert_idle(&self, window: Duration) {
        if let Err(what) = self.is_idle(window) {
            panic!("in {window:?}: {what}");
        }
    }

    /// Lets times of `window` pass until it is idle in one.
    ///
    /// # Panics
    /// When it is in none; says what it does.
    pub fn wait_until_idle(&self, window: Duration) {
        let end = Instant::now() + patience();
        while let Err(what) = self.is_idle(window) {
            assert!(Instant::now() < end, "in {window:?}: {what}");
        }
    }

    fn is_idle(&self, window: Duration) -> Result<(), String> {
        let before = self.metrics();
        self.wait_until_asleep();
        let threads = self.switches();
        // What is measured is that nothing happens in it. The end of the process alone cuts it short.
        let timeout = Timespec {
            tv_sec: window.as_secs() as i64,
            tv_nsec: window.subsec_nanos().into(),
        };
        let mut end = [PollFd::new(&self.process, PollFlags::IN)];
        assert_eq!(poll(&mut end, Some(&timeout)), Ok(0), "it has ended");
        let switches = self.switches();
        if switches != threads {
            return Err(format!("a thread has run: {threads:?}, then {switches:?}"));
        }
        let after = self.metrics();
        // The supervisor has woken up for these metrics; that it did not before, its thread's switches say.
        for (of, name) in [("devices", "wakeups"), ("vcpus", "exits")] {
            let (before, after) = (&before[of][name], &after[of][name]);
            if !before.is_u64() || before != after {
                return Err(format!("{name} of {of}: {before}, then {after}"));
            }
        }
        Ok(())
    }

    /// Until all its threads but the vCPUs' sleep, off their processor's queue, which is what having a wait channel
    /// means. The kernel tells nobody of that: looked at until it is so.
    fn wait_until_asleep(&self) {
        let end = Instant::now() + patience();
        let sleeps = |(id, _)| self.read(&format!("task/{id}/wchan")) != "0";
        while !self.threads().all(sleeps) {
            assert!(Instant::now() < end, "a thread never sleeps");
            std::thread::yield_now();
        }
    }

    /// Its threads but the vCPUs', by number and name. One is KVM's own, which looks once a minute for pages of guests
    /// to join again; it is none of the monitor's.
    fn threads(&self) -> impl Iterator<Item = (String, String)> {
        let folder = fs::read_dir(self.path("task")).unwrap();
        folder.filter_map(|entry| {
            let id = entry.unwrap().file_name().into_string().unwrap();
            let name = self.read(&format!("task/{id}/comm")).trim_end().to_owned();
            (!name.starts_with("vcpu") && !name.starts_with("kvm-")).then_some((id, name))
        })
    }

    fn path(&self, file: &str) -> String {
        format!("/proc/{}/{file}", self.pid.as_raw_nonzero())
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).unwrap()
    }
}
