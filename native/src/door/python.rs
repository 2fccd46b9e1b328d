//! The door's Python interface.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::{BufMut, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use socket2::{Domain, Protocol, Socket, Type};

use super::core::{self, Core, Step};
use super::events::{Event, Events, Request};
use super::exchange::{End, Exchange};
use super::limits::Limits;
use super::tls;

/// Parts of an answer with at least this many bytes are not copied but kept alive until they have
/// been written to the client.
const SHARED_FROM: usize = 4 << 10;

/// Number of header names that are cached for later requests, and the longest of them in bytes.
const NAMES_MAX: usize = 128;
const NAME_MAX: usize = 64;

/// A listening socket and the connections that it has accepted.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Door {
    events: Arc<Events>,
    address: SocketAddr,
    /// The process that made the door. A fork of it has no thread to run it.
    process: u32,
    state: Mutex<State>,
    names: Mutex<Names>,
}

enum State {
    Bound(TcpListener),
    Running(Arc<Core>, JoinHandle<()>),
    Closed,
}

#[pymethods]
impl Door {
    /// Binds the address without accepting yet. Raises OSError if that fails.
    #[new]
    #[pyo3(signature = (host, port, *, scope, backlog, user_timeout))]
    fn new(host: IpAddr, port: u16, scope: u32, backlog: i32, user_timeout: f64) -> PyResult<Self> {
        let address = match host {
            IpAddr::V4(host) => SocketAddr::new(host.into(), port),
            IpAddr::V6(host) => SocketAddrV6::new(host, port, 0, scope).into(),
        };
        let listener = bind(address, backlog, user_timeout)?;
        Ok(Self {
            events: Arc::new(Events::new()?),
            address: listener.local_addr()?,
            process: std::process::id(),
            state: Mutex::new(State::Bound(listener)),
            names: Mutex::default(),
        })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.address.port()
    }

    /// A descriptor that is readable while `drain` has something to return.
    fn fileno(&self) -> i32 {
        self.events.reader().as_raw_fd()
    }

    /// Starts accepting connections. `tls` names the files of a certificate and its key.
    #[pyo3(signature = (limits, tls=None))]
    fn start(&self, limits: Limits, tls: Option<(String, String)>) -> PyResult<()> {
        self.check_process()?;
        let acceptor = tls
            .map(|(certificate, key)| tls::acceptor(&certificate, &key))
            .transpose()
            .map_err(PyValueError::new_err)?;
        let mut state = self.state.lock().expect("no holder of this lock panics");
        match std::mem::replace(&mut *state, State::Closed) {
            State::Bound(listener) => {
                let core = Core::new(self.events.clone(), limits, acceptor);
                let thread = core::spawn(core.clone(), listener)?;
                *state = State::Running(core, thread);
                Ok(())
            }
            other => {
                *state = other;
                Err(PyRuntimeError::new_err("the door was started before"))
            }
        }
    }

    /// Returns all waiting events in order: requests, pieces of bodies, and changes of answers and
    /// connections.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.check_process()?;
        let events = self.events.take();
        let list = PyList::empty(py);
        let mut names = self.names.lock().expect("no holder of this lock panics");
        for event in events {
            list.append(to_python(py, event, &mut names)?)?;
        }
        Ok(list)
    }

    /// Makes the door run the steps that were queued since the last call.
    fn wake(&self) -> PyResult<()> {
        self.check_process()?;
        self.core()?.wake();
        Ok(())
    }

    /// Queues a whole answer. The door then forgets the request.
    fn respond(
        &self,
        id: u64,
        status: u16,
        headers: &Bound<'_, PyList>,
        body: &Bound<'_, PyBytes>,
    ) -> PyResult<()> {
        let (status, headers) = parse_head(status, headers)?;
        let body = share(body);
        self.step(Box::new(move |core| {
            if let Some(exchange) = core.exchange(id) {
                exchange.respond(status, headers, body);
            }
            core.close_exchange(id);
        }))
    }

    /// Queues the status and headers of an answer whose body follows.
    fn start_answer(&self, id: u64, status: u16, headers: &Bound<'_, PyList>) -> PyResult<()> {
        let (status, headers) = parse_head(status, headers)?;
        self.step_exchange(id, move |exchange| exchange.start(status, headers))
    }

    /// Queues a part of one answer, or the same part of several answers.
    fn send(&self, ids: Vec<u64>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        let data = share(data);
        self.step(Box::new(move |core| {
            for id in ids {
                if let Some(exchange) = core.exchange(id) {
                    exchange.send(data.clone());
                }
            }
        }))
    }

    /// Queues the end of an answer.
    fn end(&self, id: u64) -> PyResult<()> {
        self.step_exchange(id, |exchange| exchange.close(End::Ended))
    }

    /// Queues a watch that reports once at most `level` bytes of an answer are unread.
    fn watch(&self, id: u64, level: usize) -> PyResult<()> {
        self.step_exchange(id, move |exchange| exchange.watch(level))
    }

    /// Returns how many bytes of an answer have been written to its client so far.
    fn taken(&self, id: u64) -> PyResult<usize> {
        self.check_process()?;
        let exchange = self.core().ok().and_then(|core| core.exchange(id));
        Ok(exchange.map_or(0, |exchange| exchange.taken()))
    }

    /// Requests `size` more bytes of a request's body.
    fn ask(&self, id: u64, size: usize) -> PyResult<()> {
        self.step_exchange(id, move |exchange| exchange.ask(size))
    }

    /// Discards the rest of a request's body as it arrives.
    fn discard_body(&self, id: u64) -> PyResult<()> {
        self.step_exchange(id, |exchange| exchange.discard_body())
    }

    /// Forgets a request, and breaks off an unfinished answer.
    fn close_exchange(&self, id: u64) -> PyResult<()> {
        self.step(Box::new(move |core| core.close_exchange(id)))
    }

    /// Closes a connection, whatever it is doing.
    fn cut(&self, connection: u64) -> PyResult<()> {
        self.step(Box::new(move |core| {
            if let Some(connection) = core.connection(connection) {
                connection.cut();
            }
        }))
    }

    /// Stops accepting, and closes connections as their requests end. Reports when all are closed.
    fn stop(&self) -> PyResult<()> {
        self.step(Box::new(Core::stop))
    }

    /// Closes all connections and the socket, and ends the door's thread.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process()?;
        let state = {
            let mut state = self.state.lock().expect("no holder of this lock panics");
            std::mem::replace(&mut *state, State::Closed)
        };
        if let State::Running(core, thread) = state {
            core.closed.notify_one();
            py.detach(|| thread.join()).map_err(|_| PyRuntimeError::new_err("the door failed"))?;
        }
        Ok(())
    }
}

impl Door {
    fn core(&self) -> PyResult<Arc<Core>> {
        match &*self.state.lock().expect("no holder of this lock panics") {
            State::Running(core, _) => Ok(core.clone()),
            State::Bound(_) | State::Closed => Err(PyRuntimeError::new_err("the door is closed")),
        }
    }

    fn step(&self, step: Step) -> PyResult<()> {
        self.core()?.add_step(step);
        Ok(())
    }

    fn step_exchange(
        &self,
        id: u64,
        step: impl FnOnce(&Arc<Exchange>) + Send + 'static,
    ) -> PyResult<()> {
        self.step(Box::new(move |core| {
            if let Some(exchange) = core.exchange(id) {
                step(&exchange);
            }
        }))
    }

    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err("this process is a fork: open a door of its own"))
    }
}

fn bind(address: SocketAddr, backlog: i32, user_timeout: f64) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    // Connections inherit both options. An append's ack must not wait for a TCP ack, and a client
    // that acknowledges nothing must be dropped even if nothing is read from it.
    socket.set_tcp_nodelay(true)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(Duration::from_secs_f64(user_timeout)))?;
    #[cfg(not(target_os = "linux"))]
    let _ = user_timeout;
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    Ok(socket.into())
}

fn parse_head(status: u16, pairs: &Bound<'_, PyList>) -> PyResult<(StatusCode, HeaderMap)> {
    let status = StatusCode::from_u16(status).map_err(|_| PyValueError::new_err("bad status"))?;
    let mut headers = HeaderMap::with_capacity(pairs.len() + 2);
    for pair in pairs {
        let pair = pair.cast::<PyTuple>()?;
        let (name, value) = (pair.get_item(0)?, pair.get_item(1)?);
        let (name, value) =
            (name.cast::<PyBytes>()?.as_bytes(), value.cast::<PyBytes>()?.as_bytes());
        let parsed = HeaderName::from_bytes(name).ok().zip(HeaderValue::from_bytes(value).ok());
        let Some((name, value)) = parsed else {
            let name = String::from_utf8_lossy(name);
            return Err(PyValueError::new_err(format!("the header {name} cannot be sent")));
        };
        headers.append(name, value);
    }
    Ok((status, headers))
}

fn share(data: &Bound<'_, PyBytes>) -> Bytes {
    let bytes = data.as_bytes();
    if bytes.len() < SHARED_FROM {
        return Bytes::copy_from_slice(bytes);
    }
    Bytes::from_owner(PyBackedBytes::from(data.clone()))
}

fn to_python<'py>(
    py: Python<'py>,
    event: Event,
    names: &mut Names,
) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        Event::Request(request) => request_to_python(py, *request, names),
        Event::Piece(exchange) => {
            let parts = exchange.take_gathered();
            let size = parts.iter().map(Bytes::len).sum();
            let data = PyBytes::new_with(py, size, |mut target| {
                for part in &parts {
                    target.put_slice(part);
                }
                Ok(())
            })?;
            (1, exchange.id, data).into_pyobject(py)
        }
        Event::BodyEnd(id) => (2, id).into_pyobject(py),
        Event::Gone(id) => (3, id).into_pyobject(py),
        Event::Taken(id) => (4, id).into_pyobject(py),
        Event::Opened { connection, host, port } => (5, connection, host, port).into_pyobject(py),
        Event::Closed { connection, silent } => (6, connection, silent).into_pyobject(py),
        Event::Stopped => (7, 0).into_pyobject(py),
    }
}

fn request_to_python<'py>(
    py: Python<'py>,
    request: Request,
    names: &mut Names,
) -> PyResult<Bound<'py, PyTuple>> {
    let headers = PyDict::new(py);
    let mut repeated = Vec::new();
    let mut last = None;
    for (name, value) in request.headers {
        match name {
            Some(name) => last = Some(name_bytes(py, names, name)),
            None => repeated.extend(last.clone()),
        }
        if let Some(name) = &last {
            headers.set_item(name, PyBytes::new(py, value.as_bytes()))?;
        }
    }
    if request.version == Version::HTTP_2
        && let Some(authority) = request.uri.authority()
    {
        let authority = PyBytes::new(py, authority.as_str().as_bytes());
        headers.set_item(PyBytes::new(py, b":authority"), authority)?;
    }
    let version = match request.version {
        Version::HTTP_2 => intern!(py, "2"),
        Version::HTTP_10 => intern!(py, "1.0"),
        _ => intern!(py, "1.1"),
    };
    (
        0,
        request.id,
        request.connection,
        PyString::new(py, request.method.as_str()), // not interned: clients choose it
        PyBytes::new(py, request.uri.path().as_bytes()),
        PyBytes::new(py, request.uri.query().unwrap_or_default().as_bytes()),
        version,
        headers,
        PyTuple::new(py, repeated)?,
        request.body.map(|body| PyBytes::new(py, &body)),
    )
        .into_pyobject(py)
}

/// Header names as Python objects: the same few dozen recur.
type Names = HashMap<HeaderName, Py<PyBytes>>;

fn name_bytes<'py>(py: Python<'py>, names: &mut Names, name: HeaderName) -> Bound<'py, PyBytes> {
    if let Some(bytes) = names.get(&name) {
        return bytes.bind(py).clone();
    }
    let bytes = PyBytes::new(py, name.as_str().as_bytes());
    // Clients choose the names, so the cache is bounded.
    if names.len() < NAMES_MAX && name.as_str().len() <= NAME_MAX {
        names.insert(name, bytes.clone().unbind());
    }
    bytes
}
