//! What the integration tests share: tensors of any dtype in poisoned memory, random strided
//! layouts, and a call that can be run again on other memory.

#![allow(dead_code, reason = "each test file uses its own part of this")]

use fuselane::reference::Random;
use fuselane::{
    Act, DType, Element, Error, FusedAct, Isa, Positions, Result, TokenLayout, View, ViewMut,
    with_isa,
};
use half::{bf16, f16};

/// Shape and strides over a [`Memory`], with the element that index 0 lies at.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layout {
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<isize>,
    pub(crate) offset: usize,
    /// Elements that the memory has to have.
    pub(crate) extent: usize,
}

/// Elements kept free before and behind every tensor.
const GUARD: usize = 19;

impl Layout {
    /// Row-major, without gaps or guards.
    pub(crate) fn dense(shape: &[usize]) -> Self {
        let mut strides = vec![1isize; shape.len()];
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i] * shape[i].max(1) as isize;
        }
        let extent = shape.iter().product();
        Self { shape: shape.to_vec(), strides, offset: 0, extent }
    }

    /// Row-major, without gaps, between guards.
    pub(crate) fn guarded(shape: &[usize]) -> Self {
        let dense = Self::dense(shape);
        Self { offset: GUARD, extent: dense.extent + 2 * GUARD, ..dense }
    }

    /// Dimension `inner` contiguous and the others anywhere: permuted, with gaps, some of them
    /// reversed and, for inputs, some repeated; between guards.
    pub(crate) fn random(
        random: &mut Random,
        shape: &[usize],
        inner: Option<usize>,
        repeats: &[bool],
    ) -> Self {
        let rank = shape.len();
        let mut order: Vec<usize> = (0..rank).filter(|&d| Some(d) != inner).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i + 1));
        }
        let mut strides = vec![0isize; rank];
        let (mut reach, mut low) = (0usize, 0usize);
        for d in inner.into_iter().chain(order) {
            if repeats.get(d).copied().unwrap_or(false) {
                continue;
            }
            let gap = if Some(d) == inner { 1 } else { reach + 1 + random.below(4) };
            let turned = Some(d) != inner && random.below(3) == 0;
            strides[d] = if turned { -(gap as isize) } else { gap as isize };
            let end = gap * shape[d].max(1).saturating_sub(1);
            reach += end;
            if turned {
                low += end;
            }
        }
        let before = GUARD + random.below(5);
        Self {
            shape: shape.to_vec(),
            strides,
            offset: before + low,
            extent: before + reach + 1 + GUARD,
        }
    }

    /// Where each element lies, in index order.
    pub(crate) fn places(&self) -> Vec<usize> {
        if self.shape.contains(&0) {
            return Vec::new();
        }
        let mut places = vec![self.offset];
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let steps = (0..size).map(|i| i as isize * stride).collect::<Vec<_>>();
            let all =
                places.iter().flat_map(|&at| steps.iter().map(move |&s| at.wrapping_add_signed(s)));
            places = all.collect();
        }
        places
    }
}

/// Elements of a dtype, aligned, with bits that can be looked at.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Memory {
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    words: Vec<u64>,
}

/// A NaN that no operator makes and no input holds.
pub(crate) fn poison(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 0x7fed_beef,
        DType::F16 => 0x7eef,
        DType::BF16 => 0x7fed,
        DType::F64 => 0x7ffd_dead_beef_cafe,
    }
}

impl Memory {
    pub(crate) fn poisoned(dtype: DType, len: usize) -> Self {
        let mut memory = Self { dtype, len, words: vec![0; (len * dtype.size()).div_ceil(8) + 1] };
        for i in 0..len {
            memory.set_bits(i, poison(dtype));
        }
        memory
    }

    pub(crate) fn pointer(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    pub(crate) fn pointer_mut(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    pub(crate) fn bits(&self, i: usize) -> u64 {
        assert!(i < self.len);
        // SAFETY: element i lies inside, and the words are aligned for every dtype.
        unsafe {
            match self.dtype {
                DType::F32 => u64::from(self.pointer().cast::<u32>().add(i).read()),
                DType::F16 | DType::BF16 => u64::from(self.pointer().cast::<u16>().add(i).read()),
                DType::F64 => self.pointer().cast::<u64>().add(i).read(),
            }
        }
    }

    /// The bits of an element, with one NaN for all: sign and payload of a NaN are nobody's promise.
    pub(crate) fn bits_but_one_nan(&self, i: usize) -> u64 {
        let bits = self.bits(i);
        let (sign, infinity) = match self.dtype {
            DType::F32 => (1 << 31, 0x7f80_0000),
            DType::F16 => (1 << 15, 0x7c00),
            DType::BF16 => (1 << 15, 0x7f80),
            DType::F64 => (1 << 63, 0x7ff0_0000_0000_0000),
        };
        if bits & !sign > infinity { infinity + 1 } else { bits }
    }

    pub(crate) fn set_bits(&mut self, i: usize, bits: u64) {
        assert!(i < self.len);
        let dtype = self.dtype;
        // SAFETY: as for `bits`.
        unsafe {
            match dtype {
                DType::F32 => self.pointer_mut().cast::<u32>().add(i).write(bits as u32),
                DType::F16 | DType::BF16 => {
                    self.pointer_mut().cast::<u16>().add(i).write(bits as u16);
                }
                DType::F64 => self.pointer_mut().cast::<u64>().add(i).write(bits),
            }
        }
    }

    pub(crate) fn value(&self, i: usize) -> f64 {
        let bits = self.bits(i);
        match self.dtype {
            DType::F32 => f64::from(f32::from_bits(bits as u32)),
            DType::F16 => f16::from_bits(bits as u16).to_f64(),
            DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
            DType::F64 => f64::from_bits(bits),
        }
    }

    pub(crate) fn set(&mut self, i: usize, value: f64) {
        self.set_bits(i, bits_of(self.dtype, value));
    }

    pub(crate) fn view(&self, layout: &Layout) -> View<'_> {
        self.check(layout);
        // SAFETY: every place lies inside (just checked), and the borrow is shared.
        unsafe {
            let at = self.pointer().wrapping_add(layout.offset * self.dtype.size());
            View::from_raw(at, self.dtype, &layout.shape, &layout.strides).unwrap()
        }
    }

    pub(crate) fn view_mut(&mut self, layout: &Layout) -> ViewMut<'_> {
        self.check(layout);
        let dtype = self.dtype;
        // SAFETY: every place lies inside (just checked), and the borrow is exclusive.
        unsafe {
            let at = self.pointer_mut().wrapping_add(layout.offset * dtype.size());
            ViewMut::from_raw(at, dtype, &layout.shape, &layout.strides).unwrap()
        }
    }

    fn check(&self, layout: &Layout) {
        assert!(layout.extent <= self.len || layout.shape.contains(&0));
    }
}

/// The bits of a value rounded to a dtype.
pub(crate) fn bits_of(dtype: DType, value: f64) -> u64 {
    match dtype {
        DType::F32 => u64::from(<f32 as Element>::from_f64(value).to_bits()),
        DType::F16 => u64::from(<f16 as Element>::from_f64(value).to_bits()),
        DType::BF16 => u64::from(<bf16 as Element>::from_f64(value).to_bits()),
        DType::F64 => value.to_bits(),
    }
}

/// A value rounded to a dtype.
pub(crate) fn rounded(dtype: DType, value: f64) -> f64 {
    let mut one = Memory::poisoned(dtype, 1);
    one.set(0, value);
    one.value(0)
}

/// A tensor that a call reads: its elements in index order.
#[derive(Debug, Clone)]
pub(crate) struct Input {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f64>,
    pub(crate) kind: Kind,
    /// Dimensions along which the values repeat, so that a view of stride 0 can hold them.
    pub(crate) repeats: Vec<bool>,
}

/// What a call asks of the strides of an operand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// This dimension is contiguous.
    Inner(usize),
    /// Nothing: parameters.
    Parameter,
}

impl Input {
    /// Values rounded to the dtype; the last dimension is to be contiguous.
    pub(crate) fn new(dtype: DType, shape: &[usize], values: &[f64]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        let values = values.iter().map(|&value| rounded(dtype, value)).collect();
        let kind = Kind::Inner(shape.len().saturating_sub(1));
        Self { dtype, shape: shape.to_vec(), values, kind, repeats: vec![false; shape.len()] }
    }

    /// Normal values, with special ones here and there if `specials`.
    pub(crate) fn random(
        random: &mut Random,
        dtype: DType,
        shape: &[usize],
        specials: bool,
    ) -> Self {
        let len = shape.iter().product();
        let values: Vec<f64> = (0..len)
            .map(|_| match specials && random.below(12) == 0 {
                true => special(random, dtype),
                false => 2.0 * random.normal(),
            })
            .collect();
        Self::new(dtype, shape, &values)
    }

    /// Any strides will do.
    pub(crate) fn parameter(self) -> Self {
        Self { kind: Kind::Parameter, ..self }
    }

    pub(crate) fn inner(self, dim: usize) -> Self {
        Self { kind: Kind::Inner(dim), ..self }
    }

    /// Makes the values repeat along some outer dimensions.
    pub(crate) fn repeated(mut self, random: &mut Random) -> Self {
        for d in 0..self.shape.len() {
            if self.kind != Kind::Inner(d) && self.shape[d] > 1 && random.below(4) == 0 {
                self.repeats[d] = true;
                let inner: usize = self.shape[d + 1..].iter().product();
                let block = inner * self.shape[d];
                for outer in self.values.chunks_mut(block.max(1)) {
                    for i in inner..outer.len() {
                        outer[i] = outer[i % inner];
                    }
                }
            }
        }
        self
    }

    fn strided(&self, random: &mut Random) -> (Layout, Memory) {
        let inner = match self.kind {
            Kind::Inner(d) => Some(d).filter(|&d| d < self.shape.len()),
            Kind::Parameter => None,
        };
        let layout = Layout::random(random, &self.shape, inner, &self.repeats);
        let memory = self.memory(&layout);
        (layout, memory)
    }

    pub(crate) fn memory(&self, layout: &Layout) -> Memory {
        let mut memory = Memory::poisoned(self.dtype, layout.extent);
        let places = layout.places().into_iter();
        match self.dtype {
            DType::F32 => places.zip(&self.values).for_each(|(place, &value)| {
                memory.set_bits(place, u64::from((value as f32).to_bits()));
            }),
            DType::BF16 => places.zip(&self.values).for_each(|(place, &value)| {
                // The value is a bf16 already.
                memory.set_bits(place, u64::from((value as f32).to_bits() >> 16));
            }),
            _ => places.zip(&self.values).for_each(|(place, &value)| memory.set(place, value)),
        }
        memory
    }
}

/// A value that arithmetic treats in a way of its own.
pub(crate) fn special(random: &mut Random, dtype: DType) -> f64 {
    let (largest, smallest) = match dtype {
        DType::F32 => (f64::from(f32::MAX), 1.4e-45),
        DType::F16 => (65504.0, 6e-8),
        DType::BF16 => (3.3895313892515355e38, 9.2e-41),
        DType::F64 => (f64::MAX, 5e-324),
    };
    let value = match random.below(8) {
        0 => f64::NAN,
        1 | 2 => f64::INFINITY,
        3 => 0.0,
        4 => smallest,
        5 => smallest * 21.0,
        6 => largest,
        _ => largest / 3.0,
    };
    if random.below(2) == 0 { -value } else { value }
}

/// A tensor that a call writes.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: Kind,
}

impl Output {
    pub(crate) fn new(dtype: DType, shape: &[usize]) -> Self {
        let kind = Kind::Inner(shape.len().saturating_sub(1));
        Self { dtype, shape: shape.to_vec(), kind }
    }

    pub(crate) fn parameter(self) -> Self {
        Self { kind: Kind::Parameter, ..self }
    }

    pub(crate) fn inner(self, dim: usize) -> Self {
        Self { kind: Kind::Inner(dim), ..self }
    }
}

/// What a call gave: the bits of each output, in index order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Results {
    pub(crate) dtypes: Vec<DType>,
    pub(crate) bits: Vec<Vec<u64>>,
}

impl Results {
    /// An output, widened.
    pub(crate) fn values(&self, output: usize) -> Vec<f64> {
        let dtype = self.dtypes[output];
        let mut one = Memory::poisoned(dtype, 1);
        self.bits[output]
            .iter()
            .map(|&bits| {
                one.set_bits(0, bits);
                one.value(0)
            })
            .collect()
    }
}

/// A call of an operator, as a function of the memory it runs on.
pub(crate) struct Call<'c> {
    pub(crate) inputs: Vec<Input>,
    pub(crate) outputs: Vec<Output>,
    pub(crate) run: Box<RunOn<'c>>,
}

/// Takes the inputs and the outputs, in the order of the call.
pub(crate) type RunOn<'c> = dyn Fn(&[View<'_>], Vec<ViewMut<'_>>) -> Result<()> + Sync + 'c;

impl<'c> Call<'c> {
    pub(crate) fn new(
        inputs: Vec<Input>,
        outputs: Vec<Output>,
        run: impl Fn(&[View<'_>], Vec<ViewMut<'_>>) -> Result<()> + Sync + 'c,
    ) -> Self {
        Self { inputs, outputs, run: Box::new(run) }
    }

    /// On dense memory.
    pub(crate) fn dense(&self) -> Result<Results> {
        let inputs = self.inputs.iter().map(|input| {
            let layout = Layout::guarded(&input.shape);
            let memory = input.memory(&layout);
            (layout, memory)
        });
        let outputs = self.outputs.iter().map(|output| Layout::guarded(&output.shape));
        self.on(inputs.collect(), outputs.collect())
    }

    /// On strided memory.
    pub(crate) fn strided(&self, random: &mut Random) -> Result<Results> {
        let inputs = self.inputs.iter().map(|input| input.strided(random)).collect();
        let outputs = self
            .outputs
            .iter()
            .map(|output| {
                let inner = match output.kind {
                    Kind::Inner(d) => Some(d).filter(|&d| d < output.shape.len()),
                    Kind::Parameter => None,
                };
                Layout::random(random, &output.shape, inner, &[])
            })
            .collect();
        self.on(inputs, outputs)
    }

    /// Runs the call; checks that inputs stay as they were, that every element of the outputs is
    /// written and nothing beside them.
    fn on(&self, inputs: Vec<(Layout, Memory)>, outputs: Vec<Layout>) -> Result<Results> {
        let before = inputs.clone();
        let mut memories: Vec<Memory> = self
            .outputs
            .iter()
            .zip(&outputs)
            .map(|(output, layout)| Memory::poisoned(output.dtype, layout.extent))
            .collect();
        let views: Vec<View<'_>> = inputs.iter().map(|(layout, m)| m.view(layout)).collect();
        let written = memories.iter_mut().zip(&outputs).map(|(m, layout)| m.view_mut(layout));
        let result = (self.run)(&views, written.collect());
        assert_eq!(inputs, before, "an input was written");
        let mut bits = Vec::new();
        for (i, (memory, layout)) in memories.iter().zip(&outputs).enumerate() {
            let poison = poison(memory.dtype);
            let places = layout.places();
            let mut inside = vec![false; memory.len];
            for &place in &places {
                inside[place] = true;
            }
            for (place, inside) in inside.into_iter().enumerate() {
                let written = memory.bits(place) != poison;
                if result.is_err() {
                    assert!(!written, "output {i} was written by a call that failed");
                } else {
                    assert_eq!(written, inside, "output {i}, element {place} of {layout:?}");
                }
            }
            bits.push(places.into_iter().map(|place| memory.bits_but_one_nan(place)).collect());
        }
        result?;
        Ok(Results { dtypes: memories.iter().map(|memory| memory.dtype).collect(), bits })
    }

    /// Runs the call on dense and on strided memory, on every instruction set; both have to give
    /// the same bits. Returns the results of each instruction set.
    pub(crate) fn everywhere(&self, random: &mut Random) -> Vec<Results> {
        each_isa(|isa| {
            let dense = self.dense().unwrap();
            for _ in 0..2 {
                let strided = self.strided(random).unwrap();
                assert_same_bits(&dense, &strided, &format!("{isa}: dense and strided"));
            }
            dense
        })
    }
}

/// Calls `f` under each instruction set.
pub(crate) fn each_isa<R>(mut f: impl FnMut(Isa) -> R) -> Vec<R> {
    Isa::available().map(|isa| with_isa(isa, || f(isa)).unwrap()).collect()
}

/// Says where results differ, if they do.
pub(crate) fn assert_same_bits(a: &Results, b: &Results, what: &str) {
    for (output, (x, y)) in a.bits.iter().zip(&b.bits).enumerate() {
        assert_eq!(x.len(), y.len(), "{what}: output {output}");
        if let Some(i) = (0..x.len()).find(|&i| x[i] != y[i]) {
            let (x, y) = (a.values(output)[i], b.values(output)[i]);
            let bits = (a.bits[output][i], b.bits[output][i]);
            panic!("{what}: output {output}, element {i}: {x:e} and {y:e}, bits {bits:x?}");
        }
    }
}

/// Compares with the reference: where it is finite, within a rounding of the output and `ulps` of
/// the arithmetic on terms of this magnitude; where it is NaN or infinite, the same.
pub(crate) fn assert_near(
    what: &str,
    dtype: DType,
    got: &[f64],
    truth: &[f64],
    magnitude: &[f64],
    ulps: f64,
) {
    use fuselane::reference::ulp;
    assert_eq!(got.len(), truth.len(), "{what}");
    for (i, (&got, &truth)) in got.iter().zip(truth).enumerate() {
        let near = if got.is_finite() && truth.is_finite() {
            let arithmetic = ulp::ulp(dtype.real(), magnitude[i]);
            let arithmetic = if arithmetic.is_nan() { f64::INFINITY } else { arithmetic };
            (got - truth).abs() <= ulp::ulp(dtype, truth) + ulps * arithmetic
        } else {
            ulp::error_at(dtype, got, truth, magnitude[i]) <= ulps
        };
        let magnitude = magnitude[i];
        assert!(near, "{what}: [{i}] is {got:e}, the reference {truth:e} (terms {magnitude:e})");
    }
}

/// Runs `f` on a rayon pool of its own.
pub(crate) fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

/// The error of a call that has to fail, with its operator and argument checked.
pub(crate) fn assert_refused<T>(result: Result<T>, operator: &str, argument: &str) -> Error {
    let Err(error) = result else {
        panic!("accepted; expected {operator}: {argument} to be refused")
    };
    assert_eq!((error.operator(), error.argument()), (operator, argument), "{error}");
    let message = error.to_string();
    let start = format!("{operator}: {argument} ");
    assert!(message.starts_with(&start) && message.contains(", expected "), "{message}");
    assert!(!error.got().is_empty() && !error.expected().is_empty());
    error
}

/// The tokens of a rotate or cosine call, with everything their options borrow.
#[derive(Debug, Clone)]
pub(crate) struct Tokens {
    /// (b, n, h, d)
    pub(crate) dims: [usize; 4],
    pub(crate) dtype: DType,
    pub(crate) act: FusedAct,
    pub(crate) layout: TokenLayout,
    pub(crate) places: Places,
    pub(crate) extra_tokens: usize,
    pub(crate) sequences: Option<Vec<usize>>,
}

/// [`Positions`] that own what they point to.
#[derive(Debug, Clone)]
pub(crate) enum Places {
    From(i64),
    PerToken(Vec<i64>),
    PerBatch(Vec<i64>),
    Grid(Vec<usize>),
}

impl Tokens {
    /// `size` bounds every dimension; zeros come too.
    pub(crate) fn random(random: &mut Random, size: usize) -> Self {
        let dtype = DType::ALL[random.below(4)];
        let some = |random: &mut Random, most: usize| match random.below(12) {
            0 => 0,
            1 | 2 => 1,
            _ => 1 + random.below(most),
        };
        let [b, mut n, h] = [some(random, 4), some(random, size), some(random, 4)];
        let d = some(random, 3 * size);
        let act = match random.below(4) {
            0 => FusedAct::default(),
            1 => FusedAct::Elementwise(Act::ALL[random.below(9)]),
            2 => FusedAct::SoftmaxFeatures,
            _ => FusedAct::SoftmaxSequence,
        };
        let layout = [TokenLayout::TokensHeads, TokenLayout::HeadsTokens][random.below(2)];
        let mut position = || match random.below(10) {
            0 => 1 << 24,
            1 => -(random.below(1000) as i64),
            2 => random.below(1 << 40) as i64,
            _ => random.below(5000) as i64,
        };
        let first = position();
        let per_batch: Vec<i64> = (0..b * n).map(|_| position()).collect();
        let per_token: Vec<i64> = (0..n).map(|_| position()).collect();
        let mut extra_tokens = 0;
        let places = match random.below(5) {
            0 => Places::PerToken(per_token),
            1 => Places::PerBatch(per_batch),
            2 | 3 => {
                let grid: Vec<usize> =
                    (0..1 + random.below(3)).map(|_| 1 + random.below(4)).collect();
                extra_tokens = random.below(3);
                n = extra_tokens + grid.iter().product::<usize>();
                Places::Grid(grid)
            }
            _ => {
                extra_tokens = random.below(3).min(n);
                Places::From(first)
            }
        };
        let mut sequences = None;
        if !matches!(places, Places::Grid(_)) && extra_tokens == 0 && random.below(2) == 0 {
            let mut ends = vec![0, n];
            ends.extend((0..random.below(4)).map(|_| random.below(n + 1)));
            ends.sort_unstable();
            sequences = Some(ends);
        }
        Self { dims: [b, n, h, d], dtype, act, layout, places, extra_tokens, sequences }
    }

    pub(crate) fn positions(&self) -> Positions<'_> {
        match &self.places {
            Places::From(offset) => Positions::From(*offset),
            Places::PerToken(given) => Positions::PerToken(given),
            Places::PerBatch(given) => Positions::PerBatch(given),
            Places::Grid(shape) => Positions::Grid(shape),
        }
    }

    pub(crate) fn axes(&self) -> usize {
        match &self.places {
            Places::Grid(shape) => shape.len(),
            _ => 1,
        }
    }

    /// The shape of a tensor with `features`, in this layout.
    pub(crate) fn shape(&self, features: usize) -> [usize; 4] {
        let [b, n, h, _] = self.dims;
        match self.layout {
            TokenLayout::TokensHeads => [b, n, h, features],
            TokenLayout::HeadsTokens => [b, h, n, features],
        }
    }

    /// Elements in this layout brought into (b, n, h, features), as the reference has them.
    pub(crate) fn tokens_first<T: Copy>(&self, values: &[T], features: usize) -> Vec<T> {
        let [b, n, h, _] = self.dims;
        if self.layout == TokenLayout::TokensHeads {
            return values.to_vec();
        }
        let mut out = Vec::with_capacity(values.len());
        for batch in 0..b {
            for token in 0..n {
                for head in 0..h {
                    let row = ((batch * h + head) * n + token) * features;
                    out.extend_from_slice(&values[row..row + features]);
                }
            }
        }
        out
    }

    /// Frequencies for `count` angles: fewer than one, one column, one row, or one for each head.
    pub(crate) fn theta(&self, random: &mut Random, count: usize) -> Input {
        let [_, _, h, _] = self.dims;
        let heads = if random.below(2) == 0 { 1 } else { h };
        let columns = match random.below(3) {
            0 => 1,
            _ => count.div_ceil(self.axes()),
        };
        let dtype = DType::ALL[random.below(4)];
        let values: Vec<f64> =
            (0..heads * columns).map(|_| random.uniform(-1.0, 1.0).powi(3)).collect();
        Input::new(dtype, &[heads, columns], &values).parameter()
    }
}
