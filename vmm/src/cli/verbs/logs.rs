//! `vmm logs`: what a sandbox wrote, and with `-f` what it goes on to write.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use super::{Alive, Error, Target, status};
use crate::sandbox::LogFile;

/// `vmm logs`
#[derive(Debug, Args)]
pub struct Logs {
    #[command(flatten)]
    target: Target,
    /// The guest's serial console
    #[arg(long, conflicts_with = "monitor")]
    console: bool,
    /// What the monitor had to say in the background
    #[arg(long)]
    monitor: bool,
    /// Go on with what is written, until the sandbox ends
    #[arg(short, long)]
    follow: bool,
    /// Only the last N lines of what there is
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
}

impl Logs {
    /// Prints a log: the output of the workload of `run -d`, or else the console.
    pub fn main(&self) -> Result<u8, Error> {
        let sandbox = self.target.sandbox()?;
        let output = sandbox.file("output.log");
        let path = if self.monitor {
            sandbox.file("monitor.log")
        } else if self.console || !output.exists() {
            sandbox.file("console.log")
        } else {
            output
        };
        let failed = |source| Error::Host("read the log", source);
        // Before what there is is read, so that nothing falls in between.
        let watch = self
            .follow
            .then(|| Watch::new(&path))
            .transpose()
            .map_err(failed)?;
        let alive = if self.follow {
            Alive::find(sandbox)?
        } else {
            None
        };
        let (mut reader, mut text) = Reader::begin(&path).map_err(failed)?;
        reader.rest(&mut text).map_err(failed)?;
        let from = self.tail.map_or(0, |lines| last_lines(&text, lines));
        let mut out = io::stdout();
        let mut gone = emit(&mut out, &text[from..])?;
        while let (Some(watch), Some(alive), false) = (&watch, &alive, gone) {
            let ended = watch.wait(alive).map_err(failed)?;
            let mut more = Vec::new();
            reader.rest(&mut more).map_err(failed)?;
            gone = emit(&mut out, &more)? || ended;
        }
        Ok(status::OK)
    }
}

/// Writes; true if nobody reads any more.
fn emit(out: &mut impl Write, bytes: &[u8]) -> Result<bool, Error> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(true),
        Err(error) => Err(Error::Host("write to stdout", error)),
    }
}

/// Where the last lines begin.
fn last_lines(text: &[u8], lines: usize) -> usize {
    if lines == 0 {
        return text.len();
    }
    // The last line's own end begins no further one.
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let mut ends = body
        .iter()
        .enumerate()
        .rev()
        .filter(|(_, byte)| **byte == b'\n');
    ends.nth(lines - 1).map_or(0, |(at, _)| at + 1)
}

/// A file's bytes; none if there is no such file.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

/// A file; `None` if there is none of that name.
fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// True if both are one file, or none.
fn same(a: Option<&File>, b: Option<&File>) -> io::Result<bool> {
    let id = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
    Ok(a.map(id).transpose()? == b.map(id).transpose()?)
}

/// Reads a log on, over its change of files.
struct Reader {
    path: PathBuf,
    file: Option<File>,
    at: u64,
}

impl Reader {
    /// A reader of a log, and what is in the file before the one that it begins with.
    fn begin(path: &Path) -> io::Result<(Self, Vec<u8>)> {
        loop {
            let file = open(path)?;
            let older = read(&LogFile::older(path))?;
            // If the log began a new file in between, the older one is what we have opened, or younger than that.
            if same(file.as_ref(), open(path)?.as_ref())? {
                let reader = Self {
                    path: path.to_owned(),
                    file,
                    at: 0,
                };
                return Ok((reader, older));
            }
        }
    }

    /// All that has come since.
    fn rest(&mut self, text: &mut Vec<u8>) -> io::Result<()> {
        loop {
            if let Some(file) = &mut self.file {
                file.seek(SeekFrom::Start(self.at))?;
                self.at += file.read_to_end(text)? as u64;
            }
            // The file under that name is another one by now, if it was full.
            let Some(next) = open(&self.path)? else {
                return Ok(());
            };
            if same(self.file.as_ref(), Some(&next))? {
                return Ok(());
            }
            if let Some(file) = &mut self.file {
                // What was written to the old one before it was put aside.
                file.read_to_end(text)?;
            }
            (self.file, self.at) = (Some(next), 0);
        }
    }
}

/// Wakes when something in a log's folder changes.
struct Watch(rustix::fd::OwnedFd);

impl Watch {
    fn new(path: &Path) -> io::Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(
            &watch,
            folder,
            WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO,
        )?;
        Ok(Self(watch))
    }

    /// Waits for a change; true if the sandbox has ended, or nobody reads stdout any more.
    fn wait(&self, alive: &Alive) -> io::Result<bool> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(alive.process.as_fd(), PollFlags::IN),
            // For nothing but its errors, which need not be asked for.
            PollFd::from_borrowed_fd(rustix::stdio::stdout(), PollFlags::empty()),
        ];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => return Ok(false),
            other => other?,
        };
        let ended = fds[1..].iter().any(|fd| !fd.revents().is_empty());
        // What changed is found by looking; the events only wake.
        let mut events = [0; 4096];
        while matches!(rustix::io::read(&self.0, &mut events), Ok(count) if count > 0) {}
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_are_whole_lines() {
        let text = b"one\ntwo\nthree\n";
        for (lines, rest) in [
            (0, ""),
            (1, "three\n"),
            (2, "two\nthree\n"),
            (3, "one\ntwo\nthree\n"),
            (9, "one\ntwo\nthree\n"),
        ] {
            assert_eq!(&text[last_lines(text, lines)..], rest.as_bytes(), "{lines}");
        }
        assert_eq!(&b"a\nb"[last_lines(b"a\nb", 1)..], b"b");
        assert_eq!(last_lines(b"", 3), 0);
    }

    #[test]
    fn reading_on_loses_nothing_when_the_log_begins_a_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        let mut log = LogFile::create(&path).unwrap();
        let (mut reader, mut got) = Reader::begin(&path).unwrap();
        let mut wrote = Vec::new();
        for round in 0..60_u8 {
            let block = vec![round; 60_000];
            log.write_all(&block).unwrap();
            wrote.extend(block);
            reader.rest(&mut got).unwrap();
        }
        assert!(LogFile::older(&path).exists());
        assert!(got == wrote);
    }

    #[test]
    fn a_log_that_begins_a_new_file_as_it_is_opened_is_read_without_a_gap() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        let mut log = LogFile::create(&path).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for number in 0..1_200_000_u64 {
                    if number % 4_096 == 0 {
                        let block: Vec<u8> = (number..number + 4_096)
                            .flat_map(u64::to_le_bytes)
                            .collect();
                        log.write_all(&block).unwrap();
                    }
                }
                done.store(true, std::sync::atomic::Ordering::Release);
            });
            while !done.load(std::sync::atomic::Ordering::Acquire) {
                let (mut reader, mut text) = Reader::begin(&path).unwrap();
                // One look, as of `logs` without -f, at the file that it began with.
                if let Some(file) = &mut reader.file {
                    file.read_to_end(&mut text).unwrap();
                }
                let numbers: Vec<u64> = text
                    .chunks_exact(8)
                    .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
                    .collect();
                assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]));
            }
        });
    }
}
