//! The door's limits. Python sets them: `server/http/door.py` explains their values.

use pyo3::prelude::*;

#[derive(FromPyObject)]
pub struct Limits {
    /// Concurrent connections. Further ones wait to be accepted.
    pub connections: usize,
    /// Seconds that a connection may stay without a request: a new one, and one that has had some.
    pub first_request: f64,
    pub idle: f64,
    /// The fraction of `connections` above which both times shrink to a tenth.
    pub crowded: f64,
    /// Buffer size of an HTTP/1 connection, in bytes for each direction.
    pub buffer: usize,
    /// Total header bytes of an HTTP/2 request.
    pub headers: u32,
    /// Concurrent requests on an HTTP/2 connection, bytes that a client may send ahead on one
    /// request and on the connection, and the largest frame in bytes.
    pub streams: u32,
    pub stream_window: u32,
    pub connection_window: u32,
    pub frame: u32,
    /// Seconds between pings, and until a ping must be answered.
    pub ping_interval: f64,
    pub ping_timeout: f64,
    /// Bodies of at most this declared size are read before Python learns of their request, for at
    /// most `prompt` seconds. After that, Python gets the body in pieces.
    pub whole_body: usize,
    pub prompt: f64,
    /// Approximate limit of body bytes that wait for Python. Beyond it, bodies arrive in pieces.
    pub waiting_bodies: usize,
}
