//! The loop against a real epoll: one test for each way such loops have failed.
// The helpers of tests may unwrap as the tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vmm_events::{Answer, Interest, Poller, Readiness, Waker};

const NOW: Option<Duration> = Some(Duration::ZERO);

/// All events of one wait that does not sleep.
fn round(poller: &mut Poller<u32>, answer: Answer) -> Vec<(u32, Readiness)> {
    poller.wait(NOW).unwrap();
    let mut seen = Vec::new();
    while let Some(event) = poller.next_event() {
        seen.push((event.token, event.readiness));
        poller.answer(&event, answer);
    }
    seen
}

fn tokens(poller: &mut Poller<u32>, answer: Answer) -> Vec<u32> {
    round(poller, answer)
        .into_iter()
        .map(|(token, _)| token)
        .collect()
}

#[test]
fn vs05_event_with_no_handler_twice_is_deregistered_and_a_later_one_is_delivered_once() {
    let mut poller = Poller::new().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let source = poller.register(theirs, Interest::READ, 7).unwrap();
    ours.write_all(b"x").unwrap();

    assert_eq!(tokens(&mut poller, Answer::Unhandled), [7], "the event");
    assert_eq!(
        tokens(&mut poller, Answer::Unhandled),
        [7],
        "its free retry"
    );
    assert_eq!(poller.counters().muted, 1);
    for _ in 0..3 {
        assert_eq!(
            tokens(&mut poller, Answer::Unhandled),
            [],
            "muted, not spinning"
        );
    }
    assert_eq!(poller.registered(), 1, "its owner still has it");

    source.renew().unwrap();
    assert_eq!(tokens(&mut poller, Answer::Handled), [7]);
    assert_eq!(poller.counters().muted, 1);
}

#[test]
fn ev03_each_revision_has_one_free_retry_of_its_own() {
    let mut poller = Poller::new().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let source = poller.register(theirs, Interest::READ, 1).unwrap();
    ours.write_all(b"x").unwrap();
    for interest in [
        Interest::READ,
        Interest::READ | Interest::WRITE,
        Interest::WRITE,
    ] {
        source.modify(interest).unwrap();
        assert_eq!(tokens(&mut poller, Answer::Unhandled), [1]);
        source.modify(interest).unwrap(); // the same one again forgives nothing
        assert_eq!(tokens(&mut poller, Answer::Unhandled), [1]);
        assert_eq!(tokens(&mut poller, Answer::Unhandled), []);
    }
    assert_eq!(poller.counters().muted, 3);
}

#[test]
fn ev03_a_miss_of_a_former_owner_costs_the_next_one_nothing() {
    let mut poller = Poller::new().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let copy = theirs.try_clone().unwrap();
    let first = poller.register(theirs, Interest::READ, 1).unwrap();
    ours.write_all(b"x").unwrap();
    assert_eq!(tokens(&mut poller, Answer::Unhandled), [1]);
    drop(first);
    let _second = poller.register(copy, Interest::READ, 2).unwrap();
    assert_eq!(tokens(&mut poller, Answer::Unhandled), [2]);
    assert_eq!(
        tokens(&mut poller, Answer::Unhandled),
        [2],
        "the retry of the new owner"
    );
    assert_eq!(tokens(&mut poller, Answer::Unhandled), []);
}

#[test]
fn vs04_descriptor_number_reused_within_a_batch_gets_no_stale_event() {
    let mut poller = Poller::new().unwrap();
    let (mut a_ours, a) = UnixStream::pair().unwrap();
    let (mut b_ours, b) = UnixStream::pair().unwrap();
    let mut sources = vec![
        poller.register(a, Interest::READ, 1).unwrap(),
        poller.register(b, Interest::READ, 2).unwrap(),
    ];
    a_ours.write_all(b"x").unwrap();
    b_ours.write_all(b"x").unwrap();
    poller.wait(None).unwrap();

    // Whichever comes first closes the other and has its number taken by a third.
    let event = poller.next_event().unwrap();
    poller.answer(&event, Answer::Handled);
    let victim = sources.remove(if event.token == 1 { 1 } else { 0 });
    let number = victim.inner().as_raw_fd();
    drop(victim);
    let (_c_ours, c) = UnixStream::pair().unwrap();
    let reused = rustix::io::fcntl_dupfd_cloexec(c.as_fd(), number).unwrap();
    let _third = poller.register(reused, Interest::READ, 3).unwrap();

    assert!(poller.next_event().is_none(), "an event of the closed one");
    assert_eq!(poller.counters().stale, 1);
}

#[test]
fn vs04_10_000_open_and_close_with_forked_holders_leave_no_epoll_entry() {
    let mut poller = Poller::new().unwrap();
    // Held by a copy, as a forked child would: closing alone would leave the entry in epoll.
    let mut holders = Vec::new();
    for at in 0..10_000u32 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        if at % 100 == 0 {
            holders.push(theirs.try_clone().unwrap());
        }
        let source = poller.register(theirs, Interest::READ, at).unwrap();
        drop(ours);
        drop(source);
    }
    assert_eq!(poller.registered(), 0);
    assert_eq!(tokens(&mut poller, Answer::Unhandled), []);
    assert_eq!(poller.counters().stale, 0, "nothing left that could report");
}

#[test]
fn ev02_interest_in_nothing_is_deaf_to_a_hang_up() {
    let mut poller = Poller::new().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let source = poller.register(theirs, Interest::NONE, 1).unwrap();
    drop(ours);
    assert_eq!(tokens(&mut poller, Answer::Unhandled), []);
    source.modify(Interest::READ).unwrap();
    let seen = round(&mut poller, Answer::Handled);
    assert!(seen[0].1.readable() && seen[0].1.hung_up());
}

#[test]
fn ev02_counts_wakeups_without_progress() {
    let mut poller = Poller::new().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let _source = poller.register(theirs, Interest::READ, 1).unwrap();
    ours.write_all(b"x").unwrap();
    tokens(&mut poller, Answer::Unhandled);
    tokens(&mut poller, Answer::Handled);
    tokens(&mut poller, Answer::Handled);
    assert_eq!(poller.counters().without_progress, 1);
    assert_eq!(poller.counters().wakeups, 3);
}

#[test]
fn ev01_a_wake_before_the_wait_is_not_lost_and_one_drain_silences_many() {
    let mut poller = Poller::new().unwrap();
    let waker = Waker::new().unwrap();
    let _source = poller.register(waker.clone(), Interest::READ, 9).unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let waker = waker.clone();
            std::thread::spawn(move || (0..1000).for_each(|_| waker.wake()))
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert_eq!(tokens(&mut poller, Answer::Handled), [9]);
    assert!(waker.drain());
    assert!(!waker.drain());
    assert_eq!(tokens(&mut poller, Answer::Handled), []);
}

#[test]
fn timeouts_are_never_early() {
    let mut poller = Poller::<u32>::new().unwrap();
    for micros in [1, 900, 1100] {
        let timeout = Duration::from_micros(micros);
        let start = Instant::now();
        poller.wait(Some(timeout)).unwrap();
        assert!(start.elapsed() >= timeout);
    }
    assert_eq!(poller.counters().wakeups, 3);
}

#[test]
fn registering_what_cannot_be_watched_fails_by_name_and_leaves_no_slot() {
    let poller = Poller::<u32>::new().unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let error = poller.register(file, Interest::READ, 1).unwrap_err();
    assert_eq!(error.to_string(), "cannot watch a descriptor");
    assert_eq!(poller.registered(), 0);
}
