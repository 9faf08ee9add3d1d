//! Every interleaving of the queue of an inbox with senders and a reader that stops early, by loom.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

#[path = "../src/inbox/queue.rs"]
mod queue;

use queue::Queue;
pub use vmm_events::TrySendError;

/// No protection is left out here: the queue asks for this function of its crate.
fn negative_control(_: &str) -> bool {
    false
}

/// The inbox with its descriptor as a number: how often it was woken since it was drained.
struct Model {
    queue: Mutex<Queue<u32>>,
    wakes: AtomicUsize,
}

impl Model {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(Queue::new(capacity)),
            wakes: AtomicUsize::new(0),
        })
    }

    fn change(&self, change: impl FnOnce(&mut Queue<u32>) -> bool) {
        let mut queue = self.queue.lock().unwrap();
        if change(&mut queue) {
            self.wakes.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A turn of the loop that takes at most `most` items; none if it was not woken.
    fn turn(&self, most: usize) -> Option<Vec<u32>> {
        if self.wakes.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.queue.lock().unwrap().begin();
        self.wakes.store(0, Ordering::SeqCst);
        let taken = (0..most)
            .map_while(|_| self.queue.lock().unwrap().take())
            .collect();
        self.change(Queue::end);
        Some(taken)
    }
}

#[test]
fn ev01_whatever_is_left_has_a_wake_up_outstanding_in_every_interleaving() {
    loom::model(|| {
        let model = Model::new(4);
        let senders: Vec<_> = (0..2)
            .map(|sender: u32| {
                let model = Arc::clone(&model);
                thread::spawn(move || {
                    for word in 0..2 {
                        model.change(|queue| queue.publish(sender * 2 + word).unwrap());
                    }
                })
            })
            .collect();
        let mut taken = model.turn(1).unwrap_or_default();
        taken.extend(model.turn(1).unwrap_or_default());
        for sender in senders {
            sender.join().unwrap();
        }
        // Nobody publishes any more: from here on only what is outstanding brings a turn about.
        while let Some(items) = model.turn(1) {
            assert!(
                !items.is_empty(),
                "no wake-up is for nothing once all is quiet"
            );
            taken.extend(items);
        }
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 3], "none pending, none twice");
    });
}

#[test]
fn ev01_the_last_senders_end_is_woken_for_in_every_interleaving() {
    loom::model(|| {
        let model = Model::new(1);
        model.queue.lock().unwrap().join();
        let senders: Vec<_> = (0..2)
            .map(|_| {
                let model = Arc::clone(&model);
                thread::spawn(move || model.change(Queue::leave))
            })
            .collect();
        // A turn nobody was woken for, which asks, and may ask too early.
        model.queue.lock().unwrap().begin();
        model.wakes.store(0, Ordering::SeqCst);
        let mut seen = usize::from(model.queue.lock().unwrap().is_over());
        model.change(Queue::end);
        for sender in senders {
            sender.join().unwrap();
        }
        while model.turn(1).is_some() {
            assert!(model.queue.lock().unwrap().is_over());
            seen += 1;
        }
        assert_eq!(seen, 1, "one end, seen once");
    });
}

#[test]
fn ev01_a_full_queue_is_refused_and_its_reader_is_woken_in_every_interleaving() {
    loom::model(|| {
        let model = Model::new(1);
        let sender = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let mut refused = 0;
                for word in 0..3 {
                    model.change(|queue| match queue.publish(word) {
                        Ok(wake) => wake,
                        Err(TrySendError::Full(_)) => {
                            refused += 1;
                            false
                        }
                        Err(TrySendError::Closed(_)) => panic!("it is open"),
                    });
                }
                refused
            })
        };
        let mut taken = model.turn(1).unwrap_or_default().len();
        let refused = sender.join().unwrap();
        while let Some(items) = model.turn(1) {
            taken += items.len();
        }
        assert_eq!(taken + refused, 3, "each was taken or given back");
    });
}
