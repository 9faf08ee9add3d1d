use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, OutputModes, tcsetwinsize};

use super::*;

/// Our end of a terminal, and a terminal of nobody's session.
fn pair() -> (OwnedFd, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags).unwrap();
    unlockpt(&ours).unwrap();
    let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
    (ours, theirs)
}

fn window(rows: u16, columns: u16) -> rustix::termios::Winsize {
    rustix::termios::Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// All that a user could see of it.
fn modes(device: &OwnedFd) -> String {
    format!("{:?}", tcgetattr(device).unwrap())
}

fn is_raw_now(device: &OwnedFd) -> bool {
    let now = tcgetattr(device).unwrap();
    !now.local_modes
        .intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
        && !now.output_modes.contains(OutputModes::OPOST)
}

#[test]
fn st04_a_size_is_never_0_and_what_is_no_terminal_has_none() {
    let (_ours, theirs) = pair();
    let of = |rows, columns| {
        tcsetwinsize(&theirs, window(rows, columns)).unwrap();
        let size = size_of(theirs.as_fd()).unwrap();
        (size.rows, size.columns)
    };
    assert_eq!(of(33, 99), (33, 99));
    assert_eq!(of(0, 0), (24, 80));
    assert_eq!(of(5, 0), (5, 80));
    let (pipe, _writer) = io::pipe().unwrap();
    assert_eq!(size_of(pipe.as_fd()), None);
}

#[test]
fn a_lent_terminal_is_raw_and_comes_back_as_it_was() {
    let (_ours, theirs) = pair();
    let before = modes(&theirs);
    let terminal = Terminal::new(theirs.try_clone().unwrap());
    assert_eq!(modes(&theirs), before, "not before a command has it");
    terminal.lend().unwrap();
    assert!(is_raw_now(&theirs));
    terminal.lend().unwrap();
    terminal.give_back();
    assert_eq!(modes(&theirs), before, "twice raw, and still as it was");
    terminal.lend().unwrap();
    terminal.resume();
    assert_eq!(modes(&theirs), before, "given back for good");
}

#[test]
fn a_stop_gives_it_back_and_what_the_shell_changed_meanwhile_is_kept() {
    let (_ours, theirs) = pair();
    let terminal = Terminal::new(theirs.try_clone().unwrap());
    let before = modes(&theirs);
    terminal.resume();
    assert_eq!(modes(&theirs), before, "no command has it yet");
    assert!(!terminal.is_due());
    terminal.lend().unwrap();
    terminal.suspend();
    assert_eq!(modes(&theirs), before);
    assert!(terminal.is_due());
    let mut changed = tcgetattr(&theirs).unwrap();
    changed.special_codes[SpecialCodeIndex::VINTR] = b'x';
    tcsetattr(&theirs, OptionalActions::Now, &changed).unwrap();
    let changed = modes(&theirs);
    terminal.resume();
    assert!(is_raw_now(&theirs));
    assert!(!terminal.is_due());
    terminal.give_back();
    assert_eq!(modes(&theirs), changed);
}

#[test]
fn a_stop_that_nobody_saw_leaves_the_shells_modes_which_become_raw_again() {
    let (_ours, theirs) = pair();
    let terminal = Terminal::new(theirs.try_clone().unwrap());
    let cooked = tcgetattr(&theirs).unwrap();
    terminal.lend().unwrap();
    // SIGSTOP: the shell takes the terminal back by itself.
    tcsetattr(&theirs, OptionalActions::Now, &cooked).unwrap();
    terminal.resume();
    assert!(is_raw_now(&theirs));
    terminal.give_back();
    assert_eq!(modes(&theirs), format!("{cooked:?}"));
}

#[test]
fn the_last_handle_and_a_panic_give_it_back() {
    let (_ours, theirs) = pair();
    let before = modes(&theirs);
    let terminal = Terminal::new(theirs.try_clone().unwrap());
    terminal.lend().unwrap();
    drop(terminal);
    assert_eq!(modes(&theirs), before);

    let terminal = Terminal::new(theirs.try_clone().unwrap());
    terminal.lend().unwrap();
    // As with `panic = "abort"`: nothing but the hook runs.
    let kept = terminal.clone();
    let thread = std::thread::spawn(move || {
        let _kept = std::mem::ManuallyDrop::new(kept);
        panic!("a test of the hook");
    });
    assert!(thread.join().is_err());
    assert_eq!(modes(&theirs), before);
    terminal.resume();
    assert_eq!(modes(&theirs), before, "and it stays so");
}

#[test]
fn a_terminal_that_is_gone_is_an_error_and_no_more() {
    let (ours, theirs) = pair();
    let terminal = Terminal::new(theirs);
    terminal.lend().unwrap();
    drop(ours);
    terminal.suspend();
    assert!(terminal.lend().is_err());
    terminal.give_back();
}
