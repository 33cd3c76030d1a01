//! The limit: a plain copy that moves as many bytes as an operator has to.
//!
//! Its job has no inputs; `n` is the number of bytes to copy. Of the ways to copy (stores past the
//! caches or not, one thread or all) it takes the one that is fastest at that size.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fuselane::{Buffer, DType};
use rayon::prelude::*;

use super::Peer;
use crate::case::Operator;
use crate::copy::{self, Way};
use crate::protocol::{Job, Sample};
use crate::worker::{Call, Fault, Library, Loaded};

pub(crate) struct Copy;

impl Peer for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn applies(&self, operator: &Operator) -> bool {
        // The identity moves nothing.
        *operator != Operator::Act { act: fuselane::Act::None }
    }

    fn can_map(&self) -> bool {
        false
    }

    fn memory_factor(&self) -> f64 {
        1.0
    }
}

impl Library for Copy {
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    fn load(&self, job: &Job) -> Result<Box<dyn Loaded>, Fault> {
        Ok(Box::new(Bytes(job.n)))
    }

    fn trim(&self) {
        fuselane::pool::trim();
    }
}

struct Bytes(usize);

impl Loaded for Bytes {
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault> {
        let shape = [self.0.div_ceil(DType::F32.size())];
        let (mut from, mut to) =
            (Buffer::unfilled(DType::F32, &shape)?, Buffer::unfilled(DType::F32, &shape)?);
        // Untouched zero pages may all be one page, and then they are read from cache.
        for buffer in [&mut from, &mut to] {
            let chunks = buffer.as_mut_slice::<f32>()?.par_chunks_mut(1 << 20);
            chunks.for_each(|chunk| chunk.fill(1.5));
        }
        let mut copier = Copier { from, to, way: Way::ALL[0] };
        copier.way = copier.fastest()?;
        Ok(Box::new(copier))
    }
}

/// What is long for a copy: its first call counts as well as the others.
const LONG: Duration = Duration::from_millis(10);

struct Copier {
    from: Buffer,
    to: Buffer,
    way: Way,
}

impl Copier {
    /// By trial: the least time of several, taken in turns. Of copies that take their time, one that
    /// is slower by a half at first is not tried again.
    fn fastest(&mut self) -> Result<Way, Fault> {
        let ways = Way::ALL.into_iter().filter(|way| way.is_available());
        let mut times: Vec<(Duration, Way)> = ways.map(|way| (Duration::MAX, way)).collect();
        for _ in 0..5 {
            for (least, way) in &mut times {
                self.way = *way;
                let start = Instant::now();
                self.run()?;
                *least = start.elapsed().min(*least);
            }
            let best = times.iter().map(|(least, _)| *least).min().unwrap_or_default();
            if best > LONG {
                times.retain(|(least, _)| *least <= best + best / 2);
            }
        }
        Ok(times.into_iter().min().map_or(Way::ALL[0], |(_, way)| way))
    }
}

impl Call for Copier {
    fn run(&mut self) -> Result<(), Fault> {
        let from = copy::bytes(self.from.as_mut_slice()?);
        self.way.copy(from, copy::bytes(self.to.as_mut_slice()?));
        Ok(())
    }

    fn sample(&self, _output: &str, _samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        Err(Fault::Unsupported("a copy has nothing to compare".to_owned()))
    }
}
