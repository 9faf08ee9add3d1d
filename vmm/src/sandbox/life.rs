//! From a name to a life of its own: the lock, the next generation, its folder, and what is left at its end.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::{Value, json};
use vmm_protocol::GenerationId;
use vmm_snapshot::Generation;
use vmm_snapshot::generation::Counter;

use super::view::{Holder, LOCK_BYTES, Phase};
use super::{Error, Process, Record, Sandbox, files, root};

/// How long a process that was killed may take to be gone: much memory takes its time.
const SETTLE: Duration = Duration::from_secs(10);
/// How the folder of a sandbox that is being removed begins: no name does, so nobody takes it for one.
const REMOVED: &str = ".removed-";
/// Files of one life, not of the sandbox; a log that the next life has no use for is not to be taken for its own.
const OF_A_LIFE: [&[u8]; 6] = [
    b"current.json",
    b"last.json",
    b"monitor.log",
    b"monitor.log.1",
    b"output.log",
    b"output.log.1",
];
/// The file by which a dead run without a name is known.
const UNNAMED: &str = "unnamed";

/// What stays of a sandbox after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Logs, last record and counter, until `rm`.
    Records,
    /// Nothing.
    Nothing,
}

/// A sandbox that is ours: nobody else can start or remove it while this exists, and the kernel lets go of it when
/// this process ends, in whatever way.
#[derive(Debug)]
pub struct Claim {
    sandbox: Sandbox,
    lock: File,
    /// It has had no life yet.
    new: bool,
}

impl Sandbox {
    /// Makes the sandbox where it is missing, and takes its lock.
    ///
    /// # Errors
    /// [`Error::Busy`] names the holder, which is not disturbed; [`Error::Root`]; [`Error::File`];
    /// [`Error::Generation`] for a counter that cannot be read.
    pub fn claim(&self) -> Result<Claim, Error> {
        // Refused before anything is made: the next life's folder by the longest name that it can have.
        let counter = Counter::in_folder(&self.folder());
        let next = counter.last()?.saturating_add(1);
        root::check_length(&self.file(&format!("g{next}-{:08x}", 0)))?;
        root::ready(&self.root)?;
        let lock = self.lock()?;
        Ok(Claim {
            sandbox: self.clone(),
            lock,
            // A claim that was dropped before its life began counts for nothing.
            new: counter.last()? == 0,
        })
    }

    /// Removes it, whatever its files hold.
    ///
    /// # Errors
    /// [`Error::Busy`] if a process runs it; [`Error::Root`]; [`Error::File`].
    pub fn remove(&self) -> Result<(), Error> {
        let _lock = self.lock()?;
        remove(self)
    }

    fn lock(&self) -> Result<File, Error> {
        // Between opening the file and locking it the sandbox may be removed; then there is another file, or none.
        let mut waited = None;
        loop {
            match root::make(&self.folder(), false) {
                Ok(()) => {}
                Err(root::Error::Make { source, .. })
                    if source.kind() == ErrorKind::AlreadyExists =>
                {
                    match root::check(&self.folder()) {
                        Err(root::Error::Make { source, .. })
                            if source.kind() == ErrorKind::NotFound =>
                        {
                            continue;
                        }
                        checked => checked?,
                    }
                }
                Err(error) => return Err(error.into()),
            }
            let path = self.file("lock");
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path);
            let lock = match opened {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                other => other.map_err(Error::file("open", &path))?,
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let holder = Holder::read(&path).ok().flatten();
                    let holder = match holder {
                        Some(holder) if holder.process.is_alive() => holder.to_string(),
                        // Killed, and not done yet with giving back its memory. Once more when it is.
                        Some(Holder { process, .. })
                            if waited != Some(process) && process.gone(SETTLE).unwrap_or(false) =>
                        {
                            waited = Some(process);
                            continue;
                        }
                        // The file still names the one before: the holder has not said yet who it is.
                        _ => "another process".to_owned(),
                    };
                    return Err(Error::Busy {
                        name: self.name.clone(),
                        holder,
                    });
                }
                Err(error) => return Err(Error::file("lock", &path)(error.into())),
            }
            let ours = lock.metadata().map_err(Error::file("look at", &path))?;
            if path
                .metadata()
                .is_ok_and(|there| there.ino() == ours.ino() && there.dev() == ours.dev())
            {
                return Ok(lock);
            }
        }
    }
}

impl Claim {
    /// The sandbox.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// True if it has had no life yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.new
    }

    /// Begins its next life: sweeps what a killed one left, takes the next number durably, makes the folder for its
    /// sockets, and says `starting`.
    ///
    /// # Errors
    /// [`Error::Generation`], [`Error::File`], [`Error::Root`]; a sandbox that had no life yet is gone again.
    pub fn begin(self, keep: Keep) -> Result<Life, Error> {
        let new = self.new;
        let sandbox = self.sandbox.clone();
        // Held until it is gone, so that nobody begins what we remove.
        let held = self.lock.try_clone();
        let begun = self.try_begin(keep);
        if begun.is_err() && new && held.is_ok() {
            let _ = remove(&sandbox);
        }
        begun
    }

    fn try_begin(self, keep: Keep) -> Result<Life, Error> {
        let folder = self.sandbox.folder();
        self.sweep()?;
        if keep == Keep::Nothing {
            let mark = self.sandbox.file(UNNAMED);
            File::create(&mark).map_err(Error::file("make", &mark))?;
        }
        let counter = Counter::in_folder(&folder).next()?;
        let generation = Generation::new(counter)?;
        let id = GenerationId {
            counter,
            public_id: generation.public_id(),
        };
        let sockets = folder.join(id.folder());
        root::check_length(&sockets)?;
        root::make(&sockets, false)?;
        let life = Life {
            process: Process::own().map_err(Error::file("read", "/proc/self/stat".as_ref()))?,
            started: seconds(),
            keep,
            id,
            generation,
            sockets,
            claim: self,
            concluded: false,
        };
        life.say(Phase::Starting)?;
        Ok(life)
    }

    /// Removes what a killed life left; under the lock, so nobody uses it.
    fn sweep(&self) -> Result<(), Error> {
        let folder = self.sandbox.folder();
        let listed = fs::read_dir(&folder).map_err(Error::file("list", &folder))?;
        for entry in listed {
            let entry = entry.map_err(Error::file("list", &folder))?;
            let name = entry.file_name();
            let bytes = name.as_encoded_bytes();
            let path = entry.path();
            let is_life =
                bytes.first() == Some(&b'g') && bytes.get(1).is_some_and(u8::is_ascii_digit);
            let removed = if is_life {
                fs::remove_dir_all(&path)
            } else if OF_A_LIFE.contains(&bytes) {
                fs::remove_file(&path)
            } else {
                Ok(())
            };
            removed.map_err(Error::file("remove", &path))?;
        }
        Ok(())
    }

    /// Removes the sandbox.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(self) -> Result<(), Error> {
        remove(&self.sandbox)
    }
}

/// Removes a sandbox whose lock we hold. It goes at once, by a rename: were its files removed one by one under its name,
/// another process could make and lock a new lock file in the folder meanwhile, and lose that.
fn remove(sandbox: &Sandbox) -> Result<(), Error> {
    let folder = sandbox.folder();
    static REMOVALS: AtomicU32 = AtomicU32::new(0);
    let number = REMOVALS.fetch_add(1, Ordering::Relaxed);
    let aside = sandbox
        .root
        .join(format!("{REMOVED}{}-{number}", std::process::id()));
    // What a killed process of our number left there.
    let _ = fs::remove_dir_all(&aside);
    fs::rename(&folder, &aside).map_err(Error::file("remove", &folder))?;
    // Whoever was on the way into the folder before the rename may still make one lock file, which it then gives up.
    let mut tries = 0..16;
    loop {
        match fs::remove_dir_all(&aside) {
            Ok(()) => return Ok(()),
            // Another process swept it.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error)
                if error.kind() == ErrorKind::DirectoryNotEmpty && tries.next().is_some() => {}
            Err(error) => return Err(Error::file("remove", &aside)(error)),
        }
    }
}

/// Removes runs without a name whose process was killed, and what a killed removal left. What cannot be removed is the
/// next one's to try.
pub fn sweep_unnamed(root: &Path) {
    // Which checks that the root is ours.
    for sandbox in Sandbox::list(root).unwrap_or_default() {
        let marked = || sandbox.file(UNNAMED).exists();
        if marked()
            && let Ok(claim) = sandbox.claim()
            // Between the mark and the claim another sweep may have removed it, so that the claim made a new one; or it
            // was begun anew under that name, and is to stay.
            && (claim.is_new() || marked())
        {
            let _ = claim.remove();
        }
    }
    if root::check(root).is_err() {
        return;
    }
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(REMOVED.as_bytes())
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A life that is ours. Its sockets' folder goes when this does, and all of a sandbox that keeps nothing.
#[derive(Debug)]
pub struct Life {
    claim: Claim,
    process: Process,
    generation: Generation,
    id: GenerationId,
    sockets: PathBuf,
    started: f64,
    keep: Keep,
    concluded: bool,
}

impl Life {
    /// The sandbox.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.claim.sandbox
    }

    /// Its generation, with the secret part.
    #[must_use]
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Its generation's public part.
    #[must_use]
    pub fn id(&self) -> GenerationId {
        self.id
    }

    /// The vsock device's socket.
    #[must_use]
    pub fn vsock(&self) -> PathBuf {
        self.sockets.join("vsock.sock")
    }

    /// The control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.sockets.join("control.sock")
    }

    /// Says to others how far this life is.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn say(&self, phase: Phase) -> Result<(), Error> {
        let holder = json!({
            "pid": self.process.pid,
            "start_time": self.process.start_time,
            "boot": self.process.boot.map(|boot| format!("{boot:032x}")),
            "generation": self.id.to_string(),
            "state": phase.name(),
        });
        let mut line = holder.to_string().into_bytes();
        line.resize(LOCK_BYTES - 1, b' ');
        line.push(b'\n');
        let path = self.sandbox().file("lock");
        self.claim
            .lock
            .write_all_at(&line, 0)
            .map_err(Error::file("write", &path))?;
        files::write_json(&self.sandbox().file("current.json"), &self.current(phase))
    }

    fn current(&self, phase: Phase) -> Value {
        let mut current = json!({
            "schema": 1,
            "state": phase.name(),
            "generation": {
                "counter": self.id.counter,
                "id": format!("{:032x}", self.id.public_id),
            },
            "nonce": self.generation.nonce().hex(),
            "pid": self.process.pid,
            "start_time": self.process.start_time,
            "started": self.started,
            "snapshot": null,
        });
        // No path before there is someone to reach by it.
        if phase == Phase::Ready
            && let Some(current) = current.as_object_mut()
        {
            current.insert("folder".to_owned(), json!(self.sockets));
        }
        current
    }

    /// Ends it with a record.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn conclude(&mut self, record: &Record) -> Result<(), Error> {
        self.concluded = true;
        if self.keep == Keep::Nothing {
            return Ok(());
        }
        let value = record.json(self.id, self.started, seconds());
        files::write_json(&self.sandbox().file("last.json"), &value)
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // Whatever cannot be removed now is the next start's to sweep.
        let _ = fs::remove_dir_all(&self.sockets);
        if self.keep == Keep::Nothing {
            let _ = remove(self.sandbox());
        } else if self.concluded {
            let _ = fs::remove_file(self.sandbox().file("current.json"));
        }
    }
}

/// Seconds since 1970.
fn seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
