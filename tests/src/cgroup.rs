//! A control group of a test's own, for a program that would rearrange the one it finds itself in.

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::patience;

const ROOT: &str = "/sys/fs/cgroup";

/// A group at the top of the tree; it and all that runs in it are gone when this is dropped.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one with the controllers that a unit's limits need.
    ///
    /// # Panics
    /// Without root, or without cgroup2.
    #[allow(clippy::new_without_default)] // It does something.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let control = Path::new(ROOT).join("cgroup.subtree_control");
        fs::write(&control, "+memory +pids").unwrap_or_else(|why| {
            panic!(
                "{}: {why}; this test needs root, and cgroup2 in {ROOT}",
                control.display()
            )
        });
        let path = Path::new(ROOT).join(format!("vmm-tests-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Kills what runs in it and waits until nothing does.
    fn empty(&self) -> std::io::Result<()> {
        fs::write(self.0.join("cgroup.kill"), "1")?;
        let mut events = File::open(self.0.join("cgroup.events"))?;
        let timeout = Timespec {
            tv_sec: patience().as_secs() as i64,
            tv_nsec: 0,
        };
        loop {
            let mut text = String::new();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            if text.contains("populated 0") {
                return Ok(());
            }
            // A change since it was read.
            let changed = [PollFd::new(&events, PollFlags::PRI)];
            if poll(&mut { changed }, Some(&timeout))? == 0 {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let gone = self.empty().and_then(|()| remove(&self.0));
        if let Err(why) = gone
            && !std::thread::panicking()
        {
            panic!("{} is left: {why}", self.0.display());
        }
    }
}

/// Removes a group and those below it.
fn remove(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
