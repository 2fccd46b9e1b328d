//! The door: serves HTTP, and passes requests to Python in batches.
//!
//! One thread runs all connections. It never takes the GIL: it queues events for Python (`events`),
//! and runs steps that Python has queued (`core`). `server/http/door.py` is the Python side.

mod connection;
mod core;
mod events;
mod exchange;
mod limits;
pub mod python;
mod tls;
mod wire;
