//! One request and its answer: what Python has sent of the answer, and how much of that has been
//! written to the client.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};

use super::connection::UnderWay;
use super::events::{Event, Events};

/// No watch is set.
const NO_WATCH: usize = usize::MAX;
/// Body pieces below this many bytes are copied together.
const SMALL: usize = 4 << 10;

/// The error that breaks off an answer, so that the client notices.
pub fn broken_off() -> io::Error {
    io::Error::other("the answer was broken off")
}

pub struct Exchange {
    pub id: u64,
    /// Each piece of the answer holds the exchange, so the connection is not idle until the last
    /// has left.
    _under_way: UnderWay,
    events: Arc<Events>,
    answer: Mutex<Answer>,
    request: Mutex<BodyDemand>,
    /// Bytes of the answer that Python has sent and the connection has not written.
    unread: AtomicUsize,
    /// Bytes of the answer that have been written to the client.
    taken: AtomicUsize,
    /// Python waits until at most this many bytes are unread.
    watch: AtomicUsize,
}

#[derive(Default)]
struct Answer {
    head: Option<(StatusCode, HeaderMap)>,
    pieces: VecDeque<Piece>,
    /// All pieces were known from the start, so the size can be declared.
    whole: bool,
    end: End,
    gone: bool,
    waker: Option<Waker>,
}

#[derive(Default, PartialEq, Clone, Copy)]
pub enum End {
    #[default]
    Open,
    Ended,
    BrokenOff,
}

/// Python's demand for the request's body, and the part that waits for it.
#[derive(Default)]
struct BodyDemand {
    credit: usize,
    /// Discard further data.
    discarding: bool,
    dropped: bool,
    waker: Option<Waker>,
    /// Received data that Python has not taken. Small pieces are joined, so a client that sends two
    /// bytes at a time costs no more than its bytes.
    large: Vec<Bytes>,
    small: BytesMut,
    /// An event has announced the gathered data.
    announced: bool,
}

impl BodyDemand {
    fn gather(&mut self, data: Bytes) {
        if data.len() < SMALL {
            self.small.extend_from_slice(&data);
        } else {
            self.end_small();
            self.large.push(data);
        }
    }

    fn end_small(&mut self) {
        if !self.small.is_empty() {
            self.large.push(std::mem::take(&mut self.small).freeze());
        }
    }
}

impl Exchange {
    pub fn new(id: u64, under_way: UnderWay, events: Arc<Events>) -> Arc<Self> {
        Arc::new(Self {
            id,
            _under_way: under_way,
            events,
            answer: Mutex::default(),
            request: Mutex::default(),
            unread: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            watch: AtomicUsize::new(NO_WATCH),
        })
    }

    // The answer: Python's side

    pub fn respond(self: &Arc<Self>, status: StatusCode, headers: HeaderMap, body: Bytes) {
        let mut answer = self.lock();
        answer.head = Some((status, headers));
        answer.whole = true;
        answer.end = End::Ended;
        self.add(&mut answer, body);
        wake(&mut answer.waker);
    }

    pub fn start(&self, status: StatusCode, headers: HeaderMap) {
        let mut answer = self.lock();
        answer.head = Some((status, headers));
        wake(&mut answer.waker);
    }

    pub fn send(self: &Arc<Self>, data: Bytes) {
        let mut answer = self.lock();
        self.add(&mut answer, data);
        wake(&mut answer.waker);
    }

    fn add(self: &Arc<Self>, answer: &mut Answer, data: Bytes) {
        if !data.is_empty() && !answer.gone {
            self.unread.fetch_add(data.len(), Ordering::Relaxed);
            answer.pieces.push_back(Piece { data, exchange: self.clone() });
        }
    }

    /// Ends the answer or breaks it off, unless it is closed already.
    pub fn close(&self, end: End) {
        let mut answer = self.lock();
        if answer.end == End::Open {
            answer.end = end;
            wake(&mut answer.waker);
        }
    }

    /// Reports once at most `level` bytes are unread.
    pub fn watch(&self, level: usize) {
        self.watch.store(level, Ordering::Relaxed);
        self.report_taken();
    }

    fn report_taken(&self) {
        if self.unread.load(Ordering::Relaxed) <= self.watch.load(Ordering::Relaxed)
            && self.watch.swap(NO_WATCH, Ordering::Relaxed) != NO_WATCH
        {
            self.events.push(Event::Taken(self.id));
        }
    }

    /// Returns the bytes of the answer that have been written to the client so far.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    fn count_taken(&self, size: usize) {
        self.taken.fetch_add(size, Ordering::Relaxed);
        self.unread.fetch_sub(size, Ordering::Relaxed);
        self.report_taken();
    }

    fn lock(&self) -> MutexGuard<'_, Answer> {
        self.answer.lock().expect("no holder of this lock panics")
    }

    // The answer: hyper's side

    /// Waits until Python starts its answer.
    pub async fn answered(self: Arc<Self>) -> io::Result<Response<AnswerBody>> {
        let body = AnswerBody(self.clone());
        let (status, headers) = std::future::poll_fn(|context| {
            let mut answer = self.lock();
            if let Some(head) = answer.head.take() {
                return Poll::Ready(Ok(head));
            }
            if answer.end == End::BrokenOff {
                return Poll::Ready(Err(broken_off()));
            }
            remember(&mut answer.waker, context);
            Poll::Pending
        })
        .await?;
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }

    /// Handles a client that reads no further: drops unread pieces, and reports an early end.
    fn hang_up(&self) {
        let (pieces, early) = {
            let mut answer = self.lock();
            answer.gone = true;
            let early = answer.end == End::Open || !answer.pieces.is_empty();
            (std::mem::take(&mut answer.pieces), early && answer.end != End::BrokenOff)
        };
        drop(pieces);
        if early {
            self.report_gone();
        }
    }

    pub fn report_gone(&self) {
        self.events.push(Event::Gone(self.id));
    }

    // The body of the request

    /// Requests `size` more bytes of the body.
    pub fn ask(&self, size: usize) {
        let mut demand = self.demand();
        demand.credit += size;
        wake(&mut demand.waker);
    }

    /// Discards the rest of the body as it arrives.
    pub fn discard_body(&self) {
        let mut demand = self.demand();
        demand.discarding = true;
        wake(&mut demand.waker);
    }

    /// Stops reading the body.
    pub fn drop_body(&self) {
        let mut demand = self.demand();
        demand.dropped = true;
        wake(&mut demand.waker);
    }

    /// Passes a piece of the body to Python, unless it is discarded.
    pub fn deliver(self: &Arc<Self>, data: Bytes) {
        let mut demand = self.demand();
        demand.credit = demand.credit.saturating_sub(data.len());
        if demand.discarding || data.is_empty() {
            return;
        }
        self.events.count(data.len());
        demand.gather(data);
        if !std::mem::replace(&mut demand.announced, true) {
            drop(demand);
            self.events.push(Event::Piece(self.clone()));
        }
    }

    /// Takes the gathered data of the body.
    pub fn take_gathered(&self) -> Vec<Bytes> {
        let mut demand = self.demand();
        demand.announced = false;
        demand.end_small();
        std::mem::take(&mut demand.large)
    }

    pub fn deliver_end(&self) {
        self.events.push(Event::BodyEnd(self.id));
    }

    /// Ready(true) if Python wants more of the body, Ready(false) if it dropped the body.
    pub fn poll_demand(&self, context: &mut Context<'_>) -> Poll<bool> {
        let mut demand = self.demand();
        if demand.dropped {
            return Poll::Ready(false);
        }
        // Always remembered: the body may be dropped while its client is silent.
        remember(&mut demand.waker, context);
        if demand.discarding || demand.credit > 0 { Poll::Ready(true) } else { Poll::Pending }
    }

    fn demand(&self) -> MutexGuard<'_, BodyDemand> {
        self.request.lock().expect("no holder of this lock panics")
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

fn remember(waker: &mut Option<Waker>, context: &Context<'_>) {
    match waker {
        Some(known) if known.will_wake(context.waker()) => {}
        _ => *waker = Some(context.waker().clone()),
    }
}

/// The body of an answer, which hyper polls as the client reads. If it is dropped before its end,
/// the client has gone.
pub struct AnswerBody(Arc<Exchange>);

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}

impl Body for AnswerBody {
    type Data = Piece;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Piece>>>> {
        let mut answer = self.0.lock();
        if answer.end == End::BrokenOff {
            return Poll::Ready(Some(Err(broken_off())));
        }
        if let Some(piece) = answer.pieces.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if answer.end == End::Ended {
            return Poll::Ready(None);
        }
        remember(&mut answer.waker, context);
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        let answer = self.0.lock();
        answer.end == End::Ended && answer.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let answer = self.0.lock();
        if !answer.whole {
            return SizeHint::default();
        }
        SizeHint::with_exact(answer.pieces.iter().map(|piece| piece.data.len() as u64).sum())
    }
}

/// Bytes of an answer. They count as unread until they are written, or dropped with their
/// connection.
pub struct Piece {
    data: Bytes,
    exchange: Arc<Exchange>,
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.data.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.data
    }

    fn advance(&mut self, count: usize) {
        self.data.advance(count);
        self.exchange.count_taken(count);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if !self.data.is_empty() {
            self.exchange.count_taken(self.data.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange() -> (Arc<Events>, Arc<Exchange>) {
        let events = Arc::new(Events::new().unwrap());
        let under_way = UnderWay::new(crate::door::connection::Connection::new(1, 1));
        (events.clone(), Exchange::new(7, under_way, events))
    }

    fn kinds(events: &Events) -> Vec<&'static str> {
        let name = |event: Event| match event {
            Event::Taken(7) => "taken",
            Event::Gone(7) => "gone",
            Event::Piece(_) => "piece",
            _ => "other",
        };
        events.take().into_iter().map(name).collect()
    }

    fn body(exchange: &Arc<Exchange>) -> AnswerBody {
        AnswerBody(exchange.clone())
    }

    fn next(body: &mut AnswerBody) -> Poll<Option<Result<Piece, ()>>> {
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(body).poll_frame(&mut context).map(|frame| {
            frame.map(|result| result.map_err(|_| ()).map(|frame| frame.into_data().ok().unwrap()))
        })
    }

    #[test]
    fn what_a_client_has_taken_is_counted_to_the_byte() {
        let (events, exchange) = exchange();
        let mut body = body(&exchange);
        exchange.send(Bytes::from_static(b"0123456789"));
        exchange.watch(4);
        let Poll::Ready(Some(Ok(mut piece))) = next(&mut body) else { panic!("a piece") };
        piece.advance(5);
        assert_eq!((exchange.taken(), kinds(&events)), (5, vec![]));
        piece.advance(1);
        assert_eq!((exchange.taken(), kinds(&events)), (6, vec!["taken"]));
        drop(piece);
        assert_eq!((exchange.taken(), kinds(&events)), (10, vec![]), "nobody watches any more");
    }

    #[test]
    fn a_client_that_hangs_up_leaves_nothing_unread() {
        let (events, exchange) = exchange();
        let answer = body(&exchange);
        exchange.send(Bytes::from_static(b"0123456789"));
        exchange.watch(0);
        drop(answer);
        assert_eq!(kinds(&events), ["taken", "gone"]);
        exchange.send(Bytes::from_static(b"more"));
        exchange.watch(0);
        assert_eq!((exchange.taken(), kinds(&events)), (10, vec!["taken"]));
    }

    #[test]
    fn an_answer_that_ended_is_no_hang_up_and_one_that_breaks_off_is_an_error() {
        let (events, exchange) = exchange();
        let mut ended = body(&exchange);
        exchange.close(End::Ended);
        assert!(matches!(next(&mut ended), Poll::Ready(None)));
        drop(ended);
        assert!(kinds(&events).is_empty());

        let (events, exchange) = super::tests::exchange();
        let mut broken = body(&exchange);
        exchange.close(End::BrokenOff);
        assert!(matches!(next(&mut broken), Poll::Ready(Some(Err(())))));
        drop(broken);
        assert!(kinds(&events).is_empty(), "Python broke it off itself");
    }

    #[test]
    fn a_body_comes_as_python_asks_for_it() {
        let (events, exchange) = exchange();
        let mut context = Context::from_waker(Waker::noop());
        assert!(exchange.poll_demand(&mut context).is_pending());
        exchange.ask(4);
        assert_eq!(exchange.poll_demand(&mut context), Poll::Ready(true));
        exchange.deliver(Bytes::from_static(b"01234"));
        assert!(exchange.poll_demand(&mut context).is_pending());
        exchange.discard_body();
        assert_eq!(exchange.poll_demand(&mut context), Poll::Ready(true));
        exchange.deliver(Bytes::from_static(b"5"));
        assert_eq!(kinds(&events), ["piece"], "what is thrown away does not reach Python");
        assert_eq!(exchange.take_gathered(), [Bytes::from_static(b"01234")]);
        exchange.drop_body();
        assert_eq!(exchange.poll_demand(&mut context), Poll::Ready(false));
    }

    #[test]
    fn small_pieces_gather_until_python_takes_them() {
        let (events, exchange) = exchange();
        for _ in 0..3 {
            exchange.deliver(Bytes::from_static(b"ab"));
        }
        exchange.deliver(Bytes::from(vec![b'c'; SMALL]));
        exchange.deliver(Bytes::from_static(b"d"));
        assert_eq!((kinds(&events), events.size()), (vec!["piece"], 0));
        let sizes: Vec<usize> = exchange.take_gathered().iter().map(Bytes::len).collect();
        assert_eq!(sizes, [6, SMALL, 1]);
        exchange.deliver(Bytes::from_static(b"e"));
        assert_eq!((events.size(), kinds(&events)), (1, vec!["piece"]));
    }
}
