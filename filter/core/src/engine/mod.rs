//! What each engine wants to see: the bodies of both legs and what is taken from the prefill
//! reply.

pub mod vllm;
