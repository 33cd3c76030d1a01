//! The loops over rows, written once for all instruction sets.
//!
//! A kernel reads like its formula: [`sweep::sweep`] goes over a row block by block, a
//! [`source::Source`] loads a block of an input, a [`sink::Sink`] stores one of an output, and between
//! them stand [`crate::simd::V`]s and their operators. Each policy has one home: a row's tail and the
//! step of four blocks in `sweep`, prefetch in `source`, non-temporal stores in `sink`, what a pass
//! leaves for the next in `lanes`.

pub(crate) mod act;
pub(crate) mod encode;
pub(crate) mod lanes;
pub(crate) mod normalize;
pub(crate) mod param;
pub(crate) mod rows;
pub(crate) mod sink;
pub(crate) mod softmax;
pub(crate) mod source;
pub(crate) mod sweep;
pub(crate) mod tile;
