//! Expiring bucket keys: a Python thread waits until new ones are needed, and provides them.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use tokio::sync::Notify;

/// Keys must stay valid for at least this long to be used for a request.
const VALID: Duration = Duration::from_secs(300);

#[derive(Default)]
struct State {
    current: Option<Result<(Arc<AwsCredential>, SystemTime), String>>,
    wanted: bool,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wanted: Condvar,
    provided: Notify,
}

/// The current keys for a bucket.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Credentials {
    shared: Arc<Shared>,
}

#[pymethods]
impl Credentials {
    #[new]
    fn new() -> Self {
        Self { shared: Arc::default() }
    }

    /// Waits until keys are needed. False once they never will be.
    fn wait(&self, py: Python<'_>) -> bool {
        py.detach(|| {
            let mut state = self.shared.state.lock();
            while !state.wanted && !state.closed {
                self.shared.wanted.wait(&mut state);
            }
            !state.closed
        })
    }

    /// Sets the keys, valid until `until` (seconds since the Unix epoch).
    fn provide(&self, key_id: String, secret_key: String, token: Option<String>, until: f64) {
        let credential = Arc::new(AwsCredential { key_id, secret_key, token });
        let until = UNIX_EPOCH + Duration::try_from_secs_f64(until).unwrap_or_default();
        self.answer(Ok((credential, until)));
    }

    /// Fails the requests that wait for keys.
    fn refuse(&self, reason: String) {
        self.answer(Err(reason));
    }

    /// Makes `wait` return False.
    fn close(&self) {
        self.shared.state.lock().closed = true;
        self.shared.wanted.notify_all();
        self.answer(Err("the store was closed".to_owned()));
    }
}

impl Credentials {
    pub fn provider(&self) -> Arc<dyn CredentialProvider<Credential = AwsCredential>> {
        Arc::new(Provider(self.shared.clone()))
    }

    fn answer(&self, answer: Result<(Arc<AwsCredential>, SystemTime), String>) {
        let mut state = self.shared.state.lock();
        state.wanted = false;
        state.current = Some(answer);
        self.shared.provided.notify_waiters();
    }
}

struct Provider(Arc<Shared>);

impl std::fmt::Debug for Provider {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Provider")
    }
}

#[async_trait]
impl CredentialProvider for Provider {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let provided = self.0.provided.notified();
        tokio::pin!(provided);
        {
            let mut state = self.0.state.lock();
            match &state.current {
                Some(Ok((credential, until))) if *until > SystemTime::now() + VALID => {
                    return Ok(credential.clone());
                }
                // Nobody provides keys any more.
                Some(Err(reason)) if state.closed => return Err(refuse(reason)),
                _ => {}
            }
            provided.as_mut().enable();
            state.wanted = true;
            self.0.wanted.notify_one();
        }
        provided.await;
        let state = self.0.state.lock();
        match &state.current {
            Some(Ok((credential, _))) => Ok(credential.clone()),
            Some(Err(reason)) => Err(refuse(reason)),
            None => Err(refuse("no keys were provided")),
        }
    }
}

fn refuse(reason: &str) -> object_store::Error {
    object_store::Error::Unauthenticated { path: "S3".to_owned(), source: reason.into() }
}
