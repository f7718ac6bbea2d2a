//! A generation request on its way through an engine, counted from arrival to whatever end.

use std::sync::Arc;

use crate::core::Core;
use crate::server::Link;

/// Counts a request as running until dropped. Dropped before [`Flight::land`], it counts as
/// aborted by its client, unless the engine itself cut the connection.
pub(crate) struct Flight {
    core: Arc<Core>,
    link: Arc<Link>,
    landed: bool,
    waiting: bool,
}

impl Flight {
    pub(crate) fn begin(core: &Arc<Core>, link: &Arc<Link>) -> Self {
        core.counters.requests_total.up();
        core.counters.running.up();
        Self {
            core: Arc::clone(core),
            link: Arc::clone(link),
            landed: false,
            waiting: false,
        }
    }

    /// Counts the request as waiting instead of running, or back.
    pub(crate) fn wait(&mut self, waiting: bool) {
        if waiting == self.waiting {
            return;
        }
        let counters = &self.core.counters;
        let (from, to) = if waiting {
            (&counters.running, &counters.waiting)
        } else {
            (&counters.waiting, &counters.running)
        };
        from.down();
        to.up();
        self.waiting = waiting;
    }

    /// The request got its answer.
    pub(crate) fn land(&mut self) {
        self.landed = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let counters = &self.core.counters;
        if self.waiting {
            counters.waiting.down();
        } else {
            counters.running.down();
        }
        if !self.landed && !self.link.is_cut() {
            counters.aborted.up();
        }
    }
}
