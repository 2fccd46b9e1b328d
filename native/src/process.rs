//! System calls and process settings that Python does not expose.
#![allow(unsafe_code)] // C library calls that take and return plain numbers

use std::io;

use pyo3::prelude::*;

/// Return freed memory to the system. Does nothing where the C library has no such call.
#[pyfunction]
pub fn trim_memory(py: Python<'_>) {
    py.detach(|| {
        #[cfg(target_env = "gnu")]
        // SAFETY: any thread may call this at any time.
        unsafe {
            libc::malloc_trim(0);
        }
    });
}

/// Make the C library map each block of at least `mapped` bytes separately, keep up to `kept` free
/// bytes, and share `arenas` heaps between threads. Does nothing where it has no such settings.
#[pyfunction]
#[cfg_attr(not(target_env = "gnu"), allow(unused_variables))]
pub fn tune_memory(mapped: i32, kept: i32, arenas: i32) {
    #[cfg(target_env = "gnu")]
    // SAFETY: the parameters come from <malloc.h>, and out-of-range values are rejected.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, mapped);
        libc::mallopt(libc::M_TRIM_THRESHOLD, kept);
        libc::mallopt(libc::M_ARENA_MAX, arenas);
    }
}

/// Make the kernel send `signal` to this process when the thread that started it ends. Returns
/// false where the kernel cannot. Safe after a fork.
#[pyfunction]
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
pub fn end_with_parent(signal: u32) -> bool {
    #[cfg(target_os = "linux")]
    // SAFETY: one system call with two numbers.
    return unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::c_ulong::from(signal)) } == 0;
    #[cfg(not(target_os = "linux"))]
    false
}

/// Write a range of an open file to its device and wait. Raises OSError ENOSYS where the system
/// cannot.
#[pyfunction]
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
pub fn write_range(py: Python<'_>, descriptor: i32, start: i64, size: i64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let steps = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: one system call with four numbers.
        let status = py.detach(|| unsafe { libc::sync_file_range(descriptor, start, size, steps) });
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
    #[cfg(not(target_os = "linux"))]
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}
