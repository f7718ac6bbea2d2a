//! Waiting for what must become true: polled, bounded, explained.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

/// Time between two looks.
const STEP: Duration = Duration::from_millis(25);
/// How long a test waits for something that should take well under a second.
const PATIENCE: Duration = Duration::from_secs(15);

/// Looks until `check` gives a value; panics with `what` and the last refusal after 15 s.
pub async fn eventually<T, E, F, R>(what: &str, check: F) -> T
where
    F: FnMut() -> R,
    R: Future<Output = Result<T, E>>,
    E: Debug,
{
    within(PATIENCE, what, check).await
}

/// As [`eventually`], with another bound.
pub async fn within<T, E, F, R>(bound: Duration, what: &str, check: F) -> T
where
    F: FnMut() -> R,
    R: Future<Output = Result<T, E>>,
    E: Debug,
{
    match until(bound, check).await {
        Ok(value) => value,
        Err(last) => panic!("not within {bound:?}: {what}; last seen: {last:?}"),
    }
}

/// Looks until `check` gives a value.
///
/// # Errors
/// The last refusal when the bound has passed.
pub async fn until<T, E, F, R>(bound: Duration, mut check: F) -> Result<T, E>
where
    F: FnMut() -> R,
    R: Future<Output = Result<T, E>>,
{
    let end = Instant::now() + bound;
    loop {
        match check().await {
            Ok(value) => return Ok(value),
            Err(refusal) if Instant::now() >= end => return Err(refusal),
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}
