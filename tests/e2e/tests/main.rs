//! End-to-end tests: a real Envoy at two workers, a real agent, simulated engines.

mod routing;
