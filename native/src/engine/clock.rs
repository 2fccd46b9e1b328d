//! A clock that Python sets once, and that then advances with the monotonic clock.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use slatedb_common::clock::{SystemClock, SystemClockTicker};

/// SlateDB's clock, which stamps writes and names tables.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Clock {
    pub shared: Arc<Started>,
}

#[pymethods]
impl Clock {
    /// Starts the clock at `start` milliseconds since the Unix epoch.
    #[new]
    fn new(start: i64) -> PyResult<Self> {
        let start = DateTime::from_timestamp_millis(start)
            .ok_or_else(|| PyValueError::new_err("this is no time"))?;
        Ok(Self { shared: Arc::new(Started { start, since: Instant::now() }) })
    }
}

#[derive(Debug)]
pub struct Started {
    start: DateTime<Utc>,
    since: Instant,
}

impl SystemClock for Started {
    fn now(&self) -> DateTime<Utc> {
        self.start + TimeDelta::from_std(self.since.elapsed()).unwrap_or(TimeDelta::MAX)
    }

    fn sleep<'a>(&'a self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn ticker<'a>(&'a self, duration: Duration) -> SystemClockTicker<'a> {
        SystemClockTicker::new(self, duration)
    }
}
