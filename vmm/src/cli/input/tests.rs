use std::fs::File;
use std::io::{Seek, pipe};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};

use super::*;

/// Far beyond what any of it takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Who is asked, and their leave.
type Gate = (Sender<usize>, Mutex<Receiver<()>>);

/// A command that takes everything, and one that asks before it takes a block.
#[derive(Clone, Default)]
struct Sink {
    taken: Arc<Mutex<Vec<u8>>>,
    gate: Option<Arc<Gate>>,
    broken: bool,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if let Some(gate) = &self.gate {
            gate.0.send(bytes.len()).unwrap();
            gate.1.lock().unwrap().recv().unwrap();
        }
        self.taken.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Begins to feed; what tells of the end.
fn feed(device: impl Into<OwnedFd>, sink: &Sink) -> (Stop, Receiver<End>) {
    let (ended, end) = channel();
    let source = Source::new(device.into()).unwrap();
    let done = move |end| ended.send(end).unwrap();
    (source.feed(sink.clone(), || {}, done).unwrap(), end)
}

fn taken(sink: &Sink) -> Vec<u8> {
    sink.taken.lock().unwrap().clone()
}

#[test]
fn a_file_is_fed_whole_and_from_where_it_stands() {
    let bytes: Vec<u8> = (0..300_000u32).map(|at| (at % 251) as u8).collect();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    file.seek(io::SeekFrom::Start(5)).unwrap();
    let sink = Sink::default();
    let (_stop, end) = feed(file, &sink);
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Input)));
    assert!(taken(&sink) == bytes[5..]);
}

#[test]
fn dev_null_ends_at_once_and_a_folder_is_no_input() {
    let sink = Sink::default();
    let (_stop, end) = feed(File::open("/dev/null").unwrap(), &sink);
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Input)));
    let (_stop, end) = feed(File::open("/").unwrap(), &sink);
    match end.recv_timeout(PATIENCE) {
        Ok(End::Failed(error)) => assert_eq!(error.kind(), io::ErrorKind::IsADirectory),
        other => panic!("{other:?}"),
    }
    assert_eq!(taken(&sink), b"");
}

#[test]
fn what_is_open_for_writing_only_is_refused() {
    let (_reader, writer) = pipe().unwrap();
    let error = Source::new(writer.into()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn st01_a_pipe_that_stays_open_is_left_when_the_command_ends_and_as_it_was() {
    let (reader, mut writer) = pipe().unwrap();
    let other = reader.try_clone().unwrap();
    let before = fcntl_getfl(&other).unwrap();
    let sink = Sink::default();
    let (stop, end) = feed(reader, &sink);
    // It waits for the pipe, or will.
    stop.stop();
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Command)));
    assert_eq!(fcntl_getfl(&other).unwrap(), before, "O_NONBLOCK is shared");
    writer.write_all(b"for whoever comes next").unwrap();
    drop(writer);
    assert_eq!(taken(&sink), b"");
    assert_eq!(io::read_to_string(other).unwrap(), "for whoever comes next");
}

#[test]
fn a_command_that_does_not_read_makes_it_hold_one_block() {
    let (reader, mut writer) = pipe().unwrap();
    let size = rustix::pipe::fcntl_setpipe_size(&reader, 4 * BLOCK).unwrap();
    writer.write_all(&vec![b'x'; size]).unwrap();
    let other = reader.try_clone().unwrap();
    let ((asks, asked), (give, given)) = (channel(), channel());
    let sink = Sink {
        gate: Some(Arc::new((asks, Mutex::new(given)))),
        ..Sink::default()
    };
    let (_stop, end) = feed(reader, &sink);
    let held = asked.recv_timeout(PATIENCE).unwrap();
    assert!(held <= BLOCK);
    let left = rustix::io::ioctl_fionread(&other).unwrap();
    assert_eq!(left, (size - held) as u64, "nothing is read ahead");
    drop(writer);
    let mut rest = held;
    give.send(()).unwrap();
    while rest < size {
        rest += asked.recv_timeout(PATIENCE).unwrap();
        give.send(()).unwrap();
    }
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Input)));
    assert_eq!(taken(&sink).len(), size);
}

#[test]
fn st02_a_command_that_reads_no_more_is_an_end_and_no_failure() {
    let (reader, mut writer) = pipe().unwrap();
    let sink = Sink {
        broken: true,
        ..Sink::default()
    };
    let (_stop, end) = feed(reader, &sink);
    writer.write_all(b"in vain").unwrap();
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Command)));
    // The last reader is gone, so its writer learns that nobody reads.
    let error = loop {
        if let Err(error) = writer.write(b"x") {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn one_that_somebody_made_nonblocking_is_waited_for_all_the_same() {
    let (reader, mut writer) = pipe().unwrap();
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    let sink = Sink::default();
    let (_stop, end) = feed(reader, &sink);
    writer.write_all(b"late").unwrap();
    drop(writer);
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Input)));
    assert_eq!(taken(&sink), b"late");
}

#[test]
fn a_terminals_input_ends_with_its_end_of_file_key_and_with_a_hang_up() {
    let terminal = || {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        unlockpt(&ours).unwrap();
        let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
        (ours, theirs)
    };
    let sink = Sink::default();
    let (ours, theirs) = terminal();
    let (_stop, end) = feed(theirs, &sink);
    rustix::io::write(&ours, b"a line\n\x04").unwrap();
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Input)));
    assert_eq!(taken(&sink), b"a line\n");

    let (ours, theirs) = terminal();
    let (_stop, end) = feed(theirs, &sink);
    drop(ours);
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(End::Input)));
}
