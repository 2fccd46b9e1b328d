//! The engine: SlateDB for any Python event loop.
//!
//! A call starts on this process's runtime (`runtime`), and its result queues until the event loop
//! drains it (`calls`). Python decides what is written, flushed, compacted and deleted, and when.
//! `store/engine/native.py` is the Python side.

pub mod admin;
mod cache;
pub mod calls;
pub mod clock;
pub mod credentials;
pub mod database;
pub mod disk;
pub mod fault;
pub mod log;
mod manifest;
mod merges;
mod runtime;
pub mod storage;
