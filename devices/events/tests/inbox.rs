//! The inbox in a real loop.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use vmm_events::{Answer, Inbox, Interest, Poller, Sender, Source, TrySendError, inbox};

const NOW: Option<Duration> = Some(Duration::ZERO);

struct Rig {
    poller: Poller<()>,
    inbox: Source<Inbox<u64>>,
}

fn rig(capacity: usize) -> (Sender<u64>, Rig) {
    let (sender, inbox) = inbox(capacity).unwrap();
    let poller = Poller::new().unwrap();
    let inbox = poller.register(inbox, Interest::READ, ()).unwrap();
    (sender, Rig { poller, inbox })
}

impl Rig {
    /// One wait, and a turn of at most `most` items if it was woken.
    fn round(&mut self, timeout: Option<Duration>, most: usize) -> Option<Vec<u64>> {
        self.poller.wait(timeout).unwrap();
        let mut taken = None;
        while let Some(event) = self.poller.next_event() {
            taken = Some(self.inbox.inner().turn().take(most).collect());
            self.poller.answer(&event, Answer::Handled);
        }
        taken
    }
}

#[test]
fn ev01_what_a_turn_leaves_behind_is_woken_for_again() {
    let (sender, mut rig) = rig(8);
    for word in 0..3 {
        sender.try_send(word).unwrap();
    }
    // A next stage that is full after one item each time.
    assert_eq!(rig.round(NOW, 1), Some(vec![0]));
    assert_eq!(rig.round(NOW, 1), Some(vec![1]));
    assert_eq!(rig.round(NOW, 1), Some(vec![2]));
    assert_eq!(rig.round(NOW, 1), None, "nothing is left, and it sleeps");
}

#[test]
fn ev01_many_items_cost_one_wake_up() {
    let (sender, mut rig) = rig(1000);
    for word in 0..1000 {
        sender.try_send(word).unwrap();
    }
    assert_eq!(rig.round(NOW, usize::MAX).map(|all| all.len()), Some(1000));
    assert_eq!(rig.round(NOW, usize::MAX), None);
}

#[test]
fn ev01_none_of_a_million_from_four_threads_stays_pending() {
    const THREADS: u64 = 4;
    const EACH: u64 = 250_000;
    let (sender, mut rig) = rig(64);
    let refused = Arc::new(AtomicUsize::new(0));
    let senders: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (sender, refused) = (sender.clone(), Arc::clone(&refused));
            thread::spawn(move || {
                for word in 0..EACH {
                    let mut item = thread * EACH + word;
                    // The one wait of this test, for a loop that is at work meanwhile.
                    while let Err(error) = sender.try_send(item) {
                        let TrySendError::Full(back) = error else {
                            panic!("the loop is there");
                        };
                        refused.fetch_add(1, Ordering::Relaxed);
                        item = back;
                        thread::yield_now();
                    }
                }
            })
        })
        .collect();
    drop(sender);
    let mut last = [None; THREADS as usize];
    let (mut taken, mut most) = (0, 0);
    let deadline = Some(Duration::from_secs(60));
    while taken < THREADS * EACH {
        // It stops early, after another number of items each time.
        most = most % 7 + 1;
        let items = rig.round(deadline, most);
        for item in items.expect("something is pending and nothing woke the loop") {
            let (thread, word) = ((item / EACH) as usize, item % EACH);
            assert_eq!(
                word,
                last[thread].map_or(0, |last| last + 1),
                "in order, once"
            );
            last[thread] = Some(word);
            taken += 1;
        }
    }
    for sender in senders {
        sender.join().unwrap();
    }
    // The end of the last sender, which may have come with the last item.
    rig.round(NOW, usize::MAX);
    assert!(rig.inbox.inner().turn().is_over());
    assert_eq!(rig.round(NOW, usize::MAX), None);
}

#[test]
fn a_full_or_closed_inbox_gives_the_item_back() {
    let (sender, rig) = rig(1);
    sender.try_send(1).unwrap();
    assert_eq!(sender.try_send(2), Err(TrySendError::Full(2)));
    drop(rig);
    assert_eq!(sender.try_send(3), Err(TrySendError::Closed(3)));
}

#[test]
fn the_end_of_the_last_sender_is_seen_once() {
    let (sender, mut rig) = rig(4);
    let other = sender.clone();
    drop(sender);
    assert_eq!(rig.round(NOW, 1), None, "one is left");
    other.try_send(1).unwrap();
    drop(other);
    assert_eq!(rig.round(NOW, 9), Some(vec![1]));
    assert!(rig.inbox.inner().turn().is_over());
    assert_eq!(rig.round(NOW, 9), None, "and then it sleeps for good");
}
