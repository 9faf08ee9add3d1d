//! How connections end: each direction by itself, both at once, and by force.

use std::os::fd::AsFd;

use rustix::net::Shutdown;
use vmm_events::Interest;

use super::Token;
use super::connection::Connection;
use super::handshake::Refusal;
use super::host::{Deadline, VsockHost};
use super::muxer::Key;
use super::stream::{Reading, Stream};

impl VsockHost {
    /// Sends what is queued for the host.
    pub(super) fn flush(&mut self, key: Key) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        match stream.outbox.flush(stream.source.inner().as_fd()) {
            Ok(sent) => {
                self.forwarded(key, sent);
                self.after_flush(key);
            }
            Err(_) => self.host_lost(key),
        }
    }

    /// Passes the end of the guest's data on, once all of it has gone to the socket.
    pub(super) fn after_flush(&mut self, key: Key) {
        self.touched.push(key);
        let (Some(stream), Some(connection)) = (self.streams.get(&key), self.muxer.connection(key))
        else {
            return;
        };
        if connection.guest_sends() || !stream.outbox.is_empty() {
            return;
        }
        let _ = rustix::net::shutdown(stream.source.inner(), Shutdown::Write);
        if !connection.reads_host() {
            // Neither side sends any more.
            self.host_gone(key);
        }
    }

    /// A direction has ended by the guest's word.
    pub(super) fn on_guest_ended(&mut self, key: Key) {
        let (Some(stream), Some(connection)) = (self.streams.get(&key), self.muxer.connection(key))
        else {
            return;
        };
        if !connection.guest_receives() {
            // Tells the host's writer at once, instead of letting it fill its socket.
            let _ = rustix::net::shutdown(stream.source.inner(), Shutdown::Read);
        }
        self.after_flush(key);
    }

    /// Counts data of the guest that has left our buffer.
    pub(super) fn forwarded(&mut self, key: Key, bytes: usize) {
        // Bounded by the credit window, which is a u32.
        let bytes = bytes as u32;
        if bytes > 0 {
            self.muxer
                .update(key, |connection| connection.forwarded(bytes));
        }
    }

    /// The host's socket has failed with data of the guest on its way. What the host sent before
    /// that is still read, then the guest gets a reset.
    pub(super) fn host_lost(&mut self, key: Key) {
        let dropped = self
            .streams
            .get_mut(&key)
            .map_or(0, |stream| stream.outbox.clear());
        self.forwarded(key, dropped);
        let goes_on = self.muxer.update(key, |connection| {
            connection.host_stopped_receiving(true) && connection.reads_host()
        });
        match goes_on {
            Some(true) => self.make_readable(key),
            Some(false) => self.reset(key),
            None => {}
        }
    }

    /// End of file on the host's socket; all of its data is with the guest.
    pub(super) fn on_host_ended(&mut self, key: Key) {
        match self.muxer.update(key, Connection::host_ended) {
            Some(true) => {
                let over = self.muxer.connection(key).is_some_and(|connection| {
                    connection.host_done() || (!connection.guest_sends() && connection.held() == 0)
                });
                if over {
                    self.host_gone(key);
                } else {
                    self.touched.push(key);
                }
            }
            Some(false) => self.reset(key),
            None => {}
        }
    }

    /// The host's side is over in both directions: its socket is closed now, and the guest has
    /// until a deadline to say that it has understood.
    pub(super) fn host_gone(&mut self, key: Key) {
        let lost = self
            .take_stream(key)
            .is_some_and(|stream| !stream.outbox.is_empty());
        let in_order = self.muxer.update(key, |connection| {
            connection.host_stopped_receiving(lost) & connection.host_ended()
        });
        match in_order {
            Some(true) => {
                let deadline = self.now + self.deadlines.close;
                let timer = self.timers.insert(deadline, Deadline::Close(key));
                self.closing.insert(key, timer);
                self.control_ended(key);
            }
            Some(false) => self.reset(key),
            None => {}
        }
    }

    /// Ends a connection from our side with a reset to the guest.
    pub(super) fn reset(&mut self, key: Key) {
        self.muxer.reset(key);
        self.closed(key, Refusal::Refused("the connection was reset"));
    }

    /// The connection is gone from the muxer: lets go of its socket and all else that it has.
    pub(super) fn closed(&mut self, key: Key, refusal: Refusal) {
        if let Some(stream) = self.take_stream(key)
            && let Some(greeting) = stream.greeting
        {
            self.timers.cancel(greeting.timer);
            self.refuse(stream.source.inner(), refusal);
        }
        if let Some(timer) = self.closing.remove(&key) {
            self.timers.cancel(timer);
        }
        self.control_ended(key);
    }

    /// The guest is done both ways: what it has sent goes to the host all the same.
    pub(super) fn on_finished(&mut self, key: Key) {
        if let Some(stream) = self.take_stream(key)
            && !stream.outbox.is_empty()
        {
            self.linger(stream);
        }
        self.closed(key, Refusal::Refused("the guest closed the connection"));
    }

    fn linger(&mut self, stream: Stream) {
        let id = self.next_lingering;
        self.next_lingering += 1;
        let source = stream.source.inner().try_clone().ok().and_then(|socket| {
            self.register
                .register(socket, Interest::WRITE, Token::Lingering(id))
                .ok()
        });
        match source {
            Some(source) => {
                self.lingering.insert(id, (source, stream.outbox));
            }
            None => tracing::debug!("the last bytes of a connection are lost: no descriptor"),
        }
    }

    /// Takes a stream out of all lists, so that none grows by connections that come and go.
    fn take_stream(&mut self, key: Key) -> Option<Stream> {
        let stream = self.streams.remove(&key)?;
        if stream.reading == Reading::Ready {
            self.readable.retain(|readable| *readable != key);
        }
        Some(stream)
    }

    fn control_ended(&mut self, key: Key) {
        if self.control_connection == Some(key) {
            self.control_connection = None;
        }
    }
}
