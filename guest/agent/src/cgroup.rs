//! Cgroup leaves: one for each exec, so that all it ever started can be killed at once.
//!
//! The agent reaches the hierarchy through a descriptor of its own. What workloads see at
//! `/sys/fs/cgroup` is another, read-only mount of it, so not even user 0 can leave its leaf.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// Where leaves come from: the kernel's hierarchy, or a fake one in the loopback.
pub trait Hierarchy {
    /// What it makes.
    type Leaf: Leaf;

    /// Makes a leaf that did not exist before, whatever is lying about.
    ///
    /// # Errors
    /// What the kernel says.
    fn create(&mut self) -> Result<Self::Leaf, Errno>;

    /// Makes the next leaf ahead of time, when nobody waits. One that cannot be made is made when it is needed, or fails
    /// then.
    fn prepare(&mut self) {}
}

/// One exec's processes. Dropping it removes it if it is empty.
pub trait Leaf {
    /// Called just before the fork; what it returns is where the child is born.
    ///
    /// # Errors
    /// What the kernel says.
    fn enter(&mut self) -> Result<Option<BorrowedFd<'_>>, Errno>;

    /// A descriptor with a priority event whenever [`Leaf::populated`] may have changed; `None`
    /// if it changes by [`Leaf::kill`] alone.
    ///
    /// # Errors
    /// What the kernel says.
    fn watch(&self) -> Result<Option<OwnedFd>, Errno>;

    /// Whether any process is alive in it. Reads `watch`, which rearms its event.
    ///
    /// # Errors
    /// What the kernel says.
    fn populated(&self, watch: Option<BorrowedFd<'_>>) -> Result<bool, Errno>;

    /// Kills all of it, forks under way included. They may take a moment to be gone.
    ///
    /// # Errors
    /// What the kernel says.
    fn kill(&mut self) -> Result<(), Errno>;

    /// What it has used so far.
    fn usage(&self) -> Usage;

    /// How many of its processes were killed for memory.
    fn oom_kills(&self) -> u64;

    /// Removes it.
    ///
    /// # Errors
    /// [`Errno::BUSY`] while it is populated.
    fn remove(&mut self) -> Result<(), Errno>;
}

/// What a leaf has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in nanoseconds.
    pub cpu_ns: u64,
    /// The most memory at a time in bytes; 0 where it is not counted.
    pub peak_memory: u64,
    /// Its memory limit in bytes; `None` for none.
    pub memory_limit: Option<u64>,
}

/// The kernel's cgroup2 hierarchy.
#[derive(Debug)]
pub struct Cgroup2 {
    parent: OwnedFd,
    next: u64,
    /// Made ahead: making one takes the kernel as long as starting a small program.
    spare: Option<Cgroup>,
}

/// Controllers that leaves get where the kernel has them.
const CONTROLLERS: [&[u8]; 3] = [b"+cpu", b"+memory", b"+pids"];

impl Cgroup2 {
    /// Takes the hierarchy whose root directory is `root`, and makes the leaves' parent in it.
    ///
    /// # Errors
    /// What the kernel says. Controllers that it does not have are left out silently.
    pub fn new(root: impl AsFd) -> Result<Self, Errno> {
        for controller in CONTROLLERS {
            let _ = write(root.as_fd(), "cgroup.subtree_control", controller);
        }
        match rustix::fs::mkdirat(&root, "vmm", Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        let parent = open(root.as_fd(), "vmm", OFlags::DIRECTORY)?;
        for controller in CONTROLLERS {
            let _ = write(parent.as_fd(), "cgroup.subtree_control", controller);
        }
        Ok(Self {
            parent,
            next: 1,
            spare: None,
        })
    }

    fn make(&mut self) -> Result<Cgroup, Errno> {
        loop {
            let name = format!("exec-{}", self.next);
            self.next += 1;
            match rustix::fs::mkdirat(&self.parent, &name, Mode::from_raw_mode(0o755)) {
                Ok(()) => {}
                // Left by someone; its processes are none of ours.
                Err(Errno::EXIST) => continue,
                Err(error) => return Err(error),
            }
            let parent = self
                .parent
                .try_clone()
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE));
            let leaf = parent.and_then(|parent| {
                let directory = open(parent.as_fd(), &name, OFlags::DIRECTORY)?;
                Ok((parent, directory))
            });
            return match leaf {
                Ok((parent, directory)) => Ok(Cgroup {
                    parent,
                    directory,
                    name,
                    removed: false,
                }),
                Err(error) => {
                    let _ = rustix::fs::unlinkat(&self.parent, &name, AtFlags::REMOVEDIR);
                    Err(error)
                }
            };
        }
    }
}

impl Hierarchy for Cgroup2 {
    type Leaf = Cgroup;

    fn create(&mut self) -> Result<Cgroup, Errno> {
        match self.spare.take() {
            Some(spare) => Ok(spare),
            None => self.make(),
        }
    }

    fn prepare(&mut self) {
        if self.spare.is_none() {
            self.spare = self.make().ok();
        }
    }
}

/// A leaf in the kernel's hierarchy.
#[derive(Debug)]
pub struct Cgroup {
    parent: OwnedFd,
    directory: OwnedFd,
    name: String,
    removed: bool,
}

impl Cgroup {
    /// A number of one of its files.
    fn read(&self, name: &str, key: &str) -> Option<u64> {
        let mut text = [0u8; 1024];
        let file = open(self.directory.as_fd(), name, OFlags::RDONLY).ok()?;
        let length = rustix::io::read(file, &mut text).ok()?;
        field(text.get(..length)?, key)
    }
}

impl Leaf for Cgroup {
    fn enter(&mut self) -> Result<Option<BorrowedFd<'_>>, Errno> {
        Ok(Some(self.directory.as_fd()))
    }

    fn watch(&self) -> Result<Option<OwnedFd>, Errno> {
        open(self.directory.as_fd(), "cgroup.events", OFlags::RDONLY).map(Some)
    }

    fn populated(&self, watch: Option<BorrowedFd<'_>>) -> Result<bool, Errno> {
        let mut text = [0u8; 256];
        let length = match watch {
            Some(watch) => rustix::io::pread(watch, &mut text, 0)?,
            None => {
                let file = open(self.directory.as_fd(), "cgroup.events", OFlags::RDONLY)?;
                rustix::io::pread(file, &mut text, 0)?
            }
        };
        Ok(field(text.get(..length).unwrap_or_default(), "populated") != Some(0))
    }

    fn kill(&mut self) -> Result<(), Errno> {
        write(self.directory.as_fd(), "cgroup.kill", b"1")
    }

    fn usage(&self) -> Usage {
        Usage {
            cpu_ns: self
                .read("cpu.stat", "usage_usec")
                .unwrap_or(0)
                .saturating_mul(1000),
            peak_memory: self.read("memory.peak", "").unwrap_or(0),
            memory_limit: self.read("memory.max", ""),
        }
    }

    fn oom_kills(&self) -> u64 {
        self.read("memory.events", "oom_kill").unwrap_or(0)
    }

    fn remove(&mut self) -> Result<(), Errno> {
        if self.removed {
            return Ok(());
        }
        rustix::fs::unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR)?;
        self.removed = true;
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// The number after `key` in a flat-keyed file, or the file's only number for an empty key.
fn field(text: &[u8], key: &str) -> Option<u64> {
    std::str::from_utf8(text).ok()?.lines().find_map(|line| {
        let (name, value) = if key.is_empty() {
            ("", line)
        } else {
            line.split_once(' ')?
        };
        if name == key {
            value.trim().parse().ok()
        } else {
            None
        }
    })
}

fn open(directory: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(directory, name, flags | OFlags::CLOEXEC, Mode::empty())
}

fn write(directory: BorrowedFd<'_>, name: &str, value: &[u8]) -> Result<(), Errno> {
    let file = open(directory, name, OFlags::WRONLY)?;
    // cgroup files take a value in one write or not at all.
    rustix::io::write(file, value).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = b"populated_descendants 7\npopulated 0\nfrozen 1\n";
        assert_eq!(field(text, "populated"), Some(0));
        assert_eq!(field(text, "frozen"), Some(1));
        assert_eq!(field(text, "oom_kill"), None);
        assert_eq!(field(b"4096\n", ""), Some(4096));
        assert_eq!(field(b"max\n", ""), None);
    }
}
