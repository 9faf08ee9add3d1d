//! Who owes whom a wake-up: the queue of an inbox without its lock and its descriptor.
//!
//! ```text
//!            publish: wake              begin
//!   Asleep ----------------> Woken ----------------> Looking
//!     ^  \_______________begin________________________^  |
//!     |                        ^                         |
//!     |                        | end, something left or unseen: wake
//!     +--- end, nothing left --+-------------------------+
//! ```

use std::collections::VecDeque;

use super::TrySendError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    /// Sleeps, with no wake-up on its way. Only an empty queue has such a reader.
    Asleep,
    /// Has a wake-up on its way.
    Woken,
    /// Looks, and will look again before it sleeps.
    Looking,
}

pub(super) struct Queue<T> {
    items: VecDeque<T>,
    capacity: usize,
    senders: usize,
    open: bool,
    reader: Reader,
    /// The last sender went while the reader looked, which may have been after it asked.
    end_unseen: bool,
}

impl<T> Queue<T> {
    /// An empty queue with one sender and a reader.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            items: VecDeque::new(),
            capacity,
            senders: 1,
            open: true,
            reader: Reader::Asleep,
            end_unseen: false,
        }
    }

    /// One more sender.
    pub(super) fn join(&mut self) {
        self.senders += 1;
    }

    /// One sender less; true if the reader is to be woken, since it was the last one.
    pub(super) fn leave(&mut self) -> bool {
        self.senders -= 1;
        self.end_unseen = self.senders == 0 && self.reader == Reader::Looking;
        self.senders == 0 && self.call()
    }

    /// Adds an item; true if the reader is to be woken.
    pub(super) fn publish(&mut self, item: T) -> Result<bool, TrySendError<T>> {
        if !self.open {
            return Err(TrySendError::Closed(item));
        }
        if self.items.len() >= self.capacity {
            return Err(TrySendError::Full(item));
        }
        self.items.push_back(item);
        Ok(self.call())
    }

    /// The reader looks from now on.
    pub(super) fn begin(&mut self) {
        self.reader = Reader::Looking;
    }

    /// The oldest item.
    pub(super) fn take(&mut self) -> Option<T> {
        self.items.pop_front()
    }

    /// The reader stops looking; true if it is to be woken again, for what it has left.
    pub(super) fn end(&mut self) -> bool {
        self.reader = Reader::Asleep;
        let left = !self.items.is_empty() || std::mem::take(&mut self.end_unseen);
        left && !crate::negative_control("EV01") && self.call()
    }

    /// True if nothing is there and nothing can come.
    pub(super) fn is_over(&mut self) -> bool {
        let over = self.items.is_empty() && self.senders == 0;
        self.end_unseen &= !over;
        over
    }

    /// Takes nothing from now on; what is left.
    pub(super) fn close(&mut self) -> VecDeque<T> {
        self.open = false;
        std::mem::take(&mut self.items)
    }

    /// True if a wake-up is needed for the reader to look.
    fn call(&mut self) -> bool {
        let asleep = self.reader == Reader::Asleep;
        if asleep && self.open {
            self.reader = Reader::Woken;
        }
        asleep && self.open
    }
}
