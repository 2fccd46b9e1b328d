//! State shared by all connections of a door, and the thread that runs them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;

use super::connection::{self, Connection, UnderWay};
use super::events::{Event, Events};
use super::exchange::{End, Exchange};
use super::limits::Limits;

/// Interval between sweeps for idle connections.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);
/// Pause after a failed accept, whose likely cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// The name of the door's thread: a panic in a thread of this name ends the process.
const THREAD: &str = "streamfold-door";

/// A step that Python queues.
pub type Step = Box<dyn FnOnce(&Core) + Send>;

pub struct Core {
    pub events: Arc<Events>,
    pub limits: Limits,
    pub tls: Option<TlsAcceptor>,
    steps: Mutex<Vec<Step>>,
    stepped: Notify,
    /// Requests that Python has not finished, each with its permit from its connection's semaphore.
    exchanges: Mutex<HashMap<u64, (Arc<Exchange>, OwnedSemaphorePermit)>>,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    next_id: AtomicU64,
    stopping: AtomicBool,
    stopped: Notify,
    pub closed: Notify,
}

impl Core {
    pub fn new(events: Arc<Events>, limits: Limits, tls: Option<TlsAcceptor>) -> Arc<Self> {
        Arc::new(Self {
            events,
            limits,
            tls,
            steps: Mutex::default(),
            stepped: Notify::new(),
            exchanges: Mutex::default(),
            connections: Mutex::default(),
            next_id: AtomicU64::new(1),
            stopping: AtomicBool::new(false),
            stopped: Notify::new(),
            closed: Notify::new(),
        })
    }

    /// Queues a step, which runs after the next `wake`.
    pub fn add_step(&self, step: Step) {
        lock(&self.steps).push(step);
    }

    pub fn wake(&self) {
        self.stepped.notify_one();
    }

    pub fn open_exchange(&self, under_way: UnderWay, place: OwnedSemaphorePermit) -> Arc<Exchange> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let exchange = Exchange::new(id, under_way, self.events.clone());
        lock(&self.exchanges).insert(id, (exchange.clone(), place));
        exchange
    }

    pub fn exchange(&self, id: u64) -> Option<Arc<Exchange>> {
        lock(&self.exchanges).get(&id).map(|(exchange, _)| exchange.clone())
    }

    /// Forgets a request that Python has finished, and breaks off an unfinished answer.
    pub fn close_exchange(&self, id: u64) {
        let exchange = lock(&self.exchanges).remove(&id);
        if let Some((exchange, _place)) = exchange {
            exchange.drop_body();
            exchange.close(End::BrokenOff);
        }
    }

    pub fn connection(&self, id: u64) -> Option<Arc<Connection>> {
        lock(&self.connections).get(&id).cloned()
    }

    /// Stops accepting, and closes connections as their requests end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.stopped.notify_one();
        for connection in lock(&self.connections).values() {
            connection.stop();
        }
        self.report_stopped();
    }

    fn report_stopped(&self) {
        if self.stopping.load(Ordering::Relaxed) && lock(&self.connections).is_empty() {
            self.events.push(Event::Stopped);
        }
    }

    fn open_connection(&self, address: SocketAddr) -> Arc<Connection> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let connection = Connection::new(id, 2 * self.limits.streams as usize);
        lock(&self.connections).insert(connection.id, connection.clone());
        let (host, port) = (address.ip().to_string(), address.port());
        self.events.push(Event::Opened { connection: connection.id, host, port });
        connection
    }

    fn close_connection(&self, connection: &Connection) {
        lock(&self.connections).remove(&connection.id);
        let silent = connection.was_silent();
        self.events.push(Event::Closed { connection: connection.id, silent });
        self.report_stopped();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

/// Runs a door in its own thread until it is closed.
pub fn spawn(
    core: Arc<Core>,
    listener: std::net::TcpListener,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    end_process_on_panic();
    let events = core.events.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_park(move || events.signal())
        .build()?;
    std::thread::Builder::new().name(THREAD.into()).spawn(move || {
        runtime.block_on(async {
            let listener = TcpListener::from_std(listener).expect("the listener is a socket");
            tokio::spawn(take_steps(core.clone()));
            tokio::spawn(sweep(core.clone()));
            tokio::spawn(accept(core.clone(), listener));
            core.closed.notified().await;
        });
    })
}

/// Ends the process when the door's thread panics. Without that thread the server would only seem
/// to be up.
fn end_process_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            report(panic);
            if std::thread::current().name() == Some(THREAD) {
                eprintln!("error: the door failed, see above; this is a defect. The process ends");
                std::process::abort();
            }
        }));
    });
}

async fn take_steps(core: Arc<Core>) {
    loop {
        core.stepped.notified().await;
        let steps = std::mem::take(&mut *lock(&core.steps));
        for step in steps {
            step(&core);
        }
    }
}

/// Accepts connections up to the limit, which includes those still in their handshake.
async fn accept(core: Arc<Core>, listener: TcpListener) {
    let room = Arc::new(Semaphore::new(core.limits.connections));
    let accepting = async {
        loop {
            let place = room.clone().acquire_owned().await.expect("nobody closes the semaphore");
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(_) => {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (core, connection) = (core.clone(), core.open_connection(address));
            tokio::spawn(async move {
                connection::run(core.clone(), connection.clone(), stream).await;
                core.close_connection(&connection);
                drop(place);
            });
        }
    };
    tokio::select! {
        biased;
        () = core.stopped.notified() => {}
        () = accepting => {}
    }
}

/// Closes idle connections: new ones soon, others later, both sooner if crowded, and once the door
/// has stopped almost at once, even in the middle of a request head.
async fn sweep(core: Arc<Core>) {
    let limits = &core.limits;
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        let connections: Vec<_> = lock(&core.connections).values().cloned().collect();
        let crowded = connections.len() as f64 >= limits.crowded * limits.connections as f64;
        let stopping = core.stopping.load(Ordering::Relaxed);
        let share = match (stopping, crowded) {
            (true, _) => 0.01,
            (_, true) => 0.1,
            _ => 1.0,
        };
        for connection in connections {
            if let Some((silence, had_request)) = connection.silence() {
                let is_new = stopping || !had_request;
                let most = if is_new { limits.first_request } else { limits.idle };
                if silence.as_secs_f64() > most * share {
                    connection.close_silent();
                }
            }
        }
    }
}
