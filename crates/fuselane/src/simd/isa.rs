//! The instruction sets, and which one calls of this thread use.

use std::cell::Cell;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// An instruction set that kernels are compiled for.
///
/// The best one that the CPU has is chosen once per process. The environment variable
/// `FUSELANE_ISA` (`portable`, `avx2`, `avx512` or `avx512_wide`) forces one; a name that is unknown, or that this CPU
/// lacks, is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust that the compiler vectorises for the target's baseline.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 (F, BW, DQ and VL) besides: the lanes of [`Isa::Avx2`] with twice as many
    /// registers.
    Avx512,
    /// With VBMI too: registers of 512 bits. Where a CPU works on such registers in halves (AMD's Zen 4),
    /// [`Isa::Avx512`] is faster and chosen instead.
    Avx512Wide,
}

impl Isa {
    /// All of them, from the smallest instruction set to the largest.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Wide];

    /// Whether this CPU can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Wide => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512vbmi")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Wide => false,
        }
    }

    /// Those that this CPU can run, from the smallest to the largest.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The fastest that this CPU can run.
    fn best() -> Self {
        let fast = |isa: &Self| *isa != Self::Avx512Wide || !has_half_pipes();
        Self::available().filter(fast).last().unwrap_or(Self::Portable)
    }

    /// `"portable"`, `"avx2"`, `"avx512"` or `"avx512_wide"`, as in `FUSELANE_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Wide => "avx512_wide",
        }
    }
}

/// Whether this CPU works on registers of 512 bits in halves, as AMD's Zen 4 (family 25) does, which has
/// VBMI. Intel's CPUs with VBMI do not. Of AMD's next family, servers and desktops do not; laptops are said
/// to, and are not told apart here.
#[cfg(target_arch = "x86_64")]
fn has_half_pipes() -> bool {
    use std::arch::x86_64::__cpuid;
    #[allow(unused_unsafe)] // safe to call from Rust 1.94 on
    // SAFETY: every CPU of 64 bits has the instruction, and these two leaves.
    let (vendor, version) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let amd =
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    let family = (version >> 8 & 0xF) + (version >> 20 & 0xFF);
    amd && family <= 25
}

#[cfg(not(target_arch = "x86_64"))]
fn has_half_pipes() -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let names = "\"portable\", \"avx2\", \"avx512\" or \"avx512_wide\"";
            Error::new("isa", "name", format!("is {name:?}"), names)
        })
    }
}

thread_local! {
    static FORCED: Cell<Option<Isa>> = const { Cell::new(None) };
}

/// The instruction set that calls made by this thread use.
pub fn isa() -> Isa {
    static CHOSEN: OnceLock<Isa> = OnceLock::new();
    FORCED.get().unwrap_or_else(|| {
        *CHOSEN.get_or_init(|| {
            let wish = std::env::var("FUSELANE_ISA").ok().and_then(|name| name.parse().ok());
            wish.filter(|isa: &Isa| isa.is_available()).unwrap_or_else(Isa::best)
        })
    })
}

/// Calls `f` with all operators that it calls on this thread using `isa`, so that one process can
/// compare instruction sets. An instruction set that this CPU lacks is an error.
///
/// ```
/// use fuselane::{Act, Isa, View, with_isa};
/// let x = [1.0f32, -1.0];
/// let o = with_isa(Isa::Portable, || Act::Relu.forward(View::new(&x, &[2])?))??;
/// assert_eq!(o.to_vec::<f32>()?, [1.0, 0.0]);
/// # Ok::<(), fuselane::Error>(())
/// ```
pub fn with_isa<R>(isa: Isa, f: impl FnOnce() -> R) -> Result<R> {
    struct Restore(Option<Isa>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.set(self.0);
        }
    }
    if !isa.is_available() {
        let names = Isa::available().map(Isa::name).collect::<Vec<_>>().join(" or ");
        return Err(Error::new("isa", "name", format!("is {isa}, which this CPU lacks"), names));
    }
    let _restore = Restore(FORCED.replace(Some(isa)));
    Ok(f())
}
