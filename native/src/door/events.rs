//! Events queued for Python, in the order in which they happened: requests, pieces of bodies, and
//! changes of answers and connections.
//!
//! One byte in a pipe wakes Python for everything that queues until the door has nothing more to
//! do, or for a batch of `WAKE_AT` events or polls of connections: busy clients always leave the
//! door more to do. The pipe holds a byte exactly while `signalled` is set, so neither end ever
//! blocks.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, Version};

use super::exchange::Exchange;

/// Number of events, or of polls of connections, that wakes Python although the door has more to
/// do.
const WAKE_AT: usize = 64;

pub struct Request {
    pub id: u64,
    pub connection: u64,
    pub method: Method,
    pub uri: Uri,
    pub version: Version,
    pub headers: HeaderMap,
    /// The whole body; None if it follows in pieces.
    pub body: Option<Bytes>,
}

pub enum Event {
    Request(Box<Request>),
    /// More of a requested body has arrived. It gathers until Python takes it.
    Piece(Arc<Exchange>),
    /// The body is complete.
    BodyEnd(u64),
    /// The client hung up before the end of its request or of the answer.
    Gone(u64),
    /// Enough of the answer has been written to the client for Python to continue.
    Taken(u64),
    Opened {
        connection: u64,
        host: String,
        port: u16,
    },
    /// `silent`: the door closed it because it was idle for too long.
    Closed {
        connection: u64,
        silent: bool,
    },
    /// The door has stopped, and all connections are closed.
    Stopped,
}

struct Waiting {
    events: Vec<Event>,
    signalled: bool,
    /// Bytes of queued bodies.
    size: usize,
}

pub struct Events {
    waiting: Mutex<Waiting>,
    /// Polls of connections since Python was last woken, or the door last had nothing to do.
    turns: AtomicUsize,
    reader: PipeReader,
    writer: PipeWriter,
}

impl Events {
    pub fn new() -> std::io::Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let waiting = Mutex::new(Waiting { events: Vec::new(), signalled: false, size: 0 });
        Ok(Self { waiting, turns: AtomicUsize::new(0), reader, writer })
    }

    /// The pipe end that becomes readable when events wait.
    pub fn reader(&self) -> &PipeReader {
        &self.reader
    }

    pub fn push(&self, event: Event) {
        let mut waiting = self.lock();
        waiting.size += match &event {
            Event::Request(request) => request.body.as_ref().map_or(0, Bytes::len),
            _ => 0,
        };
        waiting.events.push(event);
        if waiting.events.len() >= WAKE_AT {
            self.signal_locked(&mut waiting);
        }
    }

    /// Counts body bytes that gather outside the events.
    pub fn count(&self, size: usize) {
        self.lock().size += size;
    }

    /// Counts a poll of a connection.
    pub fn end_turn(&self) {
        if self.turns.fetch_add(1, Ordering::Relaxed) + 1 >= WAKE_AT {
            self.signal();
        }
    }

    /// Wakes Python if events wait. Called whenever the door has nothing more to do.
    pub fn signal(&self) {
        self.turns.store(0, Ordering::Relaxed);
        let mut waiting = self.lock();
        if !waiting.events.is_empty() {
            self.signal_locked(&mut waiting);
        }
    }

    fn signal_locked(&self, waiting: &mut Waiting) {
        if !waiting.signalled {
            (&self.writer).write_all(b"x").expect("the door holds both ends of its pipe");
            waiting.signalled = true;
        }
    }

    /// Body bytes that wait for Python.
    pub fn size(&self) -> usize {
        self.lock().size
    }

    /// Takes all waiting events.
    pub fn take(&self) -> Vec<Event> {
        let mut waiting = self.lock();
        if waiting.signalled {
            let mut byte = [0];
            (&self.reader).read_exact(&mut byte).expect("the door holds both ends of its pipe");
            waiting.signalled = false;
        }
        waiting.size = 0;
        std::mem::take(&mut waiting.events)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no holder of this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_is_woken_once_for_all_that_waits() {
        let events = Events::new().unwrap();
        events.signal();
        assert!(!events.lock().signalled);
        for id in 0..3 {
            events.push(Event::Gone(id));
        }
        assert!(!events.lock().signalled, "the turn has not ended");
        events.signal();
        events.signal();
        assert_eq!(events.take().len(), 3);
        assert!(!events.lock().signalled);
        assert!(events.take().is_empty());
    }

    #[test]
    fn a_long_turn_wakes_python_before_its_end() {
        let events = Events::new().unwrap();
        for id in 0..WAKE_AT as u64 {
            events.push(Event::Gone(id));
        }
        assert!(events.lock().signalled);
    }

    #[test]
    fn connections_that_never_rest_do_not_keep_events_from_python() {
        let events = Events::new().unwrap();
        events.push(Event::Gone(1));
        for _ in 0..WAKE_AT {
            assert!(!events.lock().signalled);
            events.end_turn();
        }
        assert!(events.lock().signalled);
    }

    #[test]
    fn bytes_of_bodies_are_counted_until_python_takes_them() {
        let events = Events::new().unwrap();
        events.count(3);
        events.push(Event::BodyEnd(1));
        assert_eq!(events.size(), 3);
        events.take();
        assert_eq!(events.size(), 0);
    }
}
