//! The bytes of one connection, plain or encrypted.
//!
//! The h2 crate flushes after each DATA frame of 256 bytes or more. So small writes gather here,
//! and go to the socket together when the connection has nothing more to do.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Bytes that gather before they are written.
const GATHERED_MAX: usize = 16 << 10;
/// Bytes that one poll of a connection may read before the others get theirs. A client may send
/// frames that request nothing, cost half a microsecond each, and arrive as fast as they are read.
const TURN_MAX: usize = 32 << 10;
/// The HTTP/2 connection preface.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A socket, or TLS on it.
pub trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// Reads until the HTTP version is certain. Returns whether it is HTTP/2, and the bytes read.
pub async fn sniff(transport: &mut dyn Transport) -> io::Result<(bool, BytesMut)> {
    let mut read = BytesMut::with_capacity(1 << 10);
    loop {
        let compared = read.len().min(PREFACE.len());
        if read[..compared] != PREFACE[..compared] {
            return Ok((false, read));
        }
        if compared == PREFACE.len() {
            return Ok((true, read));
        }
        if transport.read_buf(&mut read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

struct State {
    transport: Box<dyn Transport>,
    /// Bytes read to detect the version.
    read: BytesMut,
    gathered: BytesMut,
    /// Bytes that may still be read in this poll.
    turn: usize,
}

impl State {
    fn poll_write_gathered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let transport = Pin::new(&mut self.transport);
            let written = ready!(transport.poll_write(context, &self.gathered))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(written);
        }
        // An idle connection keeps no buffer.
        self.gathered = BytesMut::new();
        Poll::Ready(Ok(()))
    }

    fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_gathered(context))?;
        Pin::new(&mut self.transport).poll_flush(context)
    }
}

/// Hyper has one clone for reading and writing, the connection's driver another for flushing.
#[derive(Clone)]
pub struct Wire {
    state: Arc<Mutex<State>>,
}

impl Wire {
    pub fn new(transport: Box<dyn Transport>, read: BytesMut) -> Self {
        let state = State { transport, read, gathered: BytesMut::new(), turn: 0 };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Begins a poll of the connection.
    pub fn begin_turn(&self) {
        self.lock().turn = TURN_MAX;
    }

    /// Writes the gathered bytes.
    pub fn poll_flush_gathered(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.lock().poll_flush(context)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let state = &mut *self.lock();
        if state.turn == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if state.read.is_empty() {
            let before = buffer.filled().len();
            ready!(Pin::new(&mut state.transport).poll_read(context, buffer))?;
            state.turn = state.turn.saturating_sub(buffer.filled().len() - before);
            return Poll::Ready(Ok(()));
        }
        let size = state.read.len().min(buffer.remaining());
        buffer.put_slice(&state.read.split_to(size));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let state = &mut *self.lock();
        let size: usize = parts.iter().map(|part| part.len()).sum();
        if state.gathered.len() + size > GATHERED_MAX {
            ready!(state.poll_write_gathered(context))?;
        }
        if size > GATHERED_MAX {
            return Pin::new(&mut state.transport).poll_write_vectored(context, parts);
        }
        for part in parts {
            state.gathered.extend_from_slice(part);
        }
        Poll::Ready(Ok(size))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: the driver flushes after each poll of the connection.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let state = &mut *self.lock();
        ready!(state.poll_flush(context))?;
        Pin::new(&mut state.transport).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::task::Waker;

    use super::*;

    #[test]
    fn a_client_that_sends_without_end_gets_a_turn_at_a_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.write_all(&[0; 4 * TURN_MAX]).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let mut wire = Wire::new(Box::new(stream), BytesMut::new());
            let mut buffer = [0; 1 << 10];
            let mut arrived = 0;
            while arrived < 4 * TURN_MAX {
                wire.begin_turn();
                let mut turn = wire.read(&mut buffer).await.unwrap();
                let mut context = Context::from_waker(Waker::noop());
                let mut target = ReadBuf::new(&mut buffer);
                while Pin::new(&mut wire).poll_read(&mut context, &mut target).is_ready() {
                    turn += target.filled().len();
                    target.clear();
                }
                assert!(turn <= TURN_MAX, "{turn}");
                arrived += turn;
            }
        });
    }
}
