//! One connection: its handshake, its HTTP version, and its requests.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Request, Response, Version};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore};

use super::core::Core;
use super::events::{self, Event};
use super::exchange::{AnswerBody, Exchange, broken_off};
use super::wire::{self, Transport, Wire};

/// A connection's state, as the sweeper and `Core::stop` see it.
pub struct Connection {
    pub id: u64,
    opened: Instant,
    requests: AtomicUsize,
    had_request: AtomicBool,
    /// When the last request ended, in milliseconds after `opened`.
    idle_since: AtomicU64,
    silent: AtomicBool,
    cut: Notify,
    stop: Notify,
    /// Limits the requests that Python has not finished, whether or not their client has gone.
    places: Arc<Semaphore>,
}

impl Connection {
    pub fn new(id: u64, places: usize) -> Arc<Self> {
        Arc::new(Self {
            id,
            opened: Instant::now(),
            requests: AtomicUsize::new(0),
            had_request: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
            silent: AtomicBool::new(false),
            cut: Notify::new(),
            stop: Notify::new(),
            places: Arc::new(Semaphore::new(places)),
        })
    }

    /// Returns how long the connection has had no request, and whether it ever had one. None if a
    /// request is running.
    pub fn silence(&self) -> Option<(Duration, bool)> {
        if self.requests.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let since = Duration::from_millis(self.idle_since.load(Ordering::Relaxed));
        let silence = self.opened.elapsed().saturating_sub(since);
        Some((silence, self.had_request.load(Ordering::Relaxed)))
    }

    /// Closes the connection because it was idle for too long.
    pub fn close_silent(&self) {
        self.silent.store(true, Ordering::Relaxed);
        self.cut();
    }

    pub fn was_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    /// Closes the connection, whatever it is doing.
    pub fn cut(&self) {
        self.cut.notify_one();
    }

    /// Closes the connection after its running requests.
    pub fn stop(&self) {
        self.stop.notify_one();
    }
}

/// Marks a request as running until its answer has left: entirely written, or dropped.
pub struct UnderWay(Arc<Connection>);

impl UnderWay {
    pub fn new(connection: Arc<Connection>) -> Self {
        connection.requests.fetch_add(1, Ordering::Relaxed);
        connection.had_request.store(true, Ordering::Relaxed);
        Self(connection)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let since = self.0.opened.elapsed().as_millis();
        self.0.idle_since.store(since as u64, Ordering::Relaxed);
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves a connection to its end.
pub async fn run(core: Arc<Core>, connection: Arc<Connection>, stream: TcpStream) {
    tokio::select! {
        () = connection.cut.notified() => {}
        // A connection error reaches each request on it.
        _ = serve(core, connection.clone(), stream) => {}
    }
}

async fn serve(core: Arc<Core>, connection: Arc<Connection>, stream: TcpStream) -> io::Result<()> {
    let opened = tokio::select! {
        // No request has arrived yet, so nothing is lost.
        () = connection.stop.notified() => return Ok(()),
        opened = open(&core, stream) => opened,
    };
    let (is_http2, wire) = opened?;
    let io = TokioIo::new(wire.clone());
    let limits = &core.limits;
    let service = service_fn({
        let (core, connection) = (core.clone(), connection.clone());
        move |request| answer(core.clone(), UnderWay::new(connection.clone()), request)
    });
    if is_http2 {
        let served = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(limits.stream_window)
            .initial_connection_window_size(limits.connection_window)
            .max_frame_size(limits.frame)
            .max_header_list_size(limits.headers)
            .max_concurrent_streams(limits.streams)
            // Hyper then buffers one piece of each answer ahead of the client.
            .max_send_buf_size(1)
            .keep_alive_interval(Duration::from_secs_f64(limits.ping_interval))
            .keep_alive_timeout(Duration::from_secs_f64(limits.ping_timeout))
            .serve_connection(io, service);
        drive(served, http2::Connection::graceful_shutdown, &wire, &core, &connection).await
    } else {
        let served = http1::Builder::new()
            // The sweeper closes connections whose head does not arrive.
            .header_read_timeout(None)
            .max_buf_size(limits.buffer)
            .serve_connection(io, service);
        drive(served, http1::Connection::graceful_shutdown, &wire, &core, &connection).await
    }
}

/// Completes the handshake and detects the HTTP version. Returns whether it is HTTP/2.
async fn open(core: &Core, stream: TcpStream) -> io::Result<(bool, Wire)> {
    let mut transport: Box<dyn Transport> = match &core.tls {
        None => Box::new(stream),
        Some(acceptor) => Box::new(acceptor.accept(stream).await?),
    };
    let (is_http2, read) = wire::sniff(&mut *transport).await?;
    Ok((is_http2, Wire::new(transport, read)))
}

/// Polls hyper's connection, and flushes the gathered writes after each poll.
async fn drive<C: Future>(
    served: C,
    shut_down: impl Fn(Pin<&mut C>),
    wire: &Wire,
    core: &Core,
    connection: &Connection,
) -> io::Result<()> {
    let (mut served, mut stop) = (pin!(served), pin!(connection.stop.notified()));
    let mut stopping = false;
    std::future::poll_fn(move |context| {
        if !stopping && stop.as_mut().poll(context).is_ready() {
            stopping = true;
            shut_down(served.as_mut());
        }
        wire.begin_turn();
        let ended = served.as_mut().poll(context).is_ready();
        core.events.end_turn();
        match wire.poll_flush_gathered(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ if ended => Poll::Ready(Ok(())),
            _ => Poll::Pending,
        }
    })
    .await
}

/// Passes a request to Python and waits for its answer.
async fn answer(
    core: Arc<Core>,
    under_way: UnderWay,
    request: Request<Incoming>,
) -> io::Result<Response<AnswerBody>> {
    // A client that resets its requests waits here until Python has finished them.
    let places = under_way.0.places.clone();
    let place = places.acquire_owned().await.map_err(|_| broken_off())?;
    let (head, mut body) = request.into_parts();
    let mut arrived = Vec::new();
    let state = if body.is_end_stream() {
        Arrival::Whole
    } else if is_small(&core, &head.headers) {
        let prompt = Duration::from_secs_f64(core.limits.prompt);
        let read = read_whole(&mut body, head.version, &mut arrived);
        tokio::time::timeout(prompt, read).await.unwrap_or(Arrival::Part)
    } else {
        Arrival::Part
    };
    let connection = under_way.0.id;
    let exchange = core.open_exchange(under_way, place);
    core.events.push(Event::Request(Box::new(events::Request {
        id: exchange.id,
        connection,
        method: head.method,
        uri: head.uri,
        version: head.version,
        headers: head.headers,
        body: (state == Arrival::Whole).then(|| join(&mut arrived)),
    })));
    for data in arrived {
        exchange.deliver(data);
    }
    match state {
        Arrival::Whole => {}
        Arrival::Part => drop(tokio::spawn(read_on(body, head.version, exchange.clone()))),
        // A client that closed only its sending side still listens, so Python answers it.
        Arrival::BrokenOff => exchange.report_gone(),
    }
    exchange.answered().await
}

/// How much of a body has arrived.
#[derive(PartialEq)]
enum Arrival {
    Whole,
    Part,
    BrokenOff,
}

/// Whether to read the body before Python learns of its request.
fn is_small(core: &Core, headers: &HeaderMap) -> bool {
    let declared = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    declared.is_some_and(|size: usize| size <= core.limits.whole_body)
        && core.events.size() < core.limits.waiting_bodies
}

/// Reads a body to its end.
async fn read_whole(body: &mut Incoming, version: Version, arrived: &mut Vec<Bytes>) -> Arrival {
    loop {
        match next_frame(body).await {
            Some(Ok(frame)) => arrived.extend(frame.into_data()),
            None if has_ended(body, version) => return Arrival::Whole,
            None | Some(Err(_)) => return Arrival::BrokenOff,
        }
        // The end of a body of declared length needs no further poll.
        if body.is_end_stream() {
            return Arrival::Whole;
        }
    }
}

/// Passes the rest of a body to Python as it asks for it.
async fn read_on(mut body: Incoming, version: Version, exchange: Arc<Exchange>) {
    loop {
        let frame = std::future::poll_fn(|context| match exchange.poll_demand(context) {
            Poll::Ready(true) => poll_frame(&mut body, context).map(Some),
            Poll::Ready(false) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        match frame.await {
            None => return,
            Some(Some(Ok(frame))) => exchange.deliver(frame.into_data().unwrap_or_default()),
            Some(None) if has_ended(&body, version) => return exchange.deliver_end(),
            Some(None | Some(Err(_))) => return exchange.report_gone(),
        }
    }
}

/// Whether a body without further frames is complete. Over HTTP/2, hyper reports a reset body as
/// ended.
fn has_ended(body: &Incoming, version: Version) -> bool {
    version != Version::HTTP_2 || body.is_end_stream()
}

type NextFrame = Option<Result<Frame<Bytes>, hyper::Error>>;

fn poll_frame(body: &mut Incoming, context: &mut Context<'_>) -> Poll<NextFrame> {
    Pin::new(body).poll_frame(context)
}

fn next_frame(body: &mut Incoming) -> impl Future<Output = NextFrame> {
    std::future::poll_fn(|context| poll_frame(body, context))
}

fn join(parts: &mut Vec<Bytes>) -> Bytes {
    if parts.len() <= 1 {
        return parts.pop().unwrap_or_default();
    }
    std::mem::take(parts).concat().into()
}
