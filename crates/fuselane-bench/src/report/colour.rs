//! The colours of pictures. Those of the page's dark theme replace them by CSS, which finds an
//! element by the light colour that it was drawn with: so each colour has one meaning only.

use plotters::style::RGBColor;

use super::data::COPY;

pub(crate) const BACKGROUND: RGBColor = RGBColor(0xFF, 0xFF, 0xFF);
pub(crate) const TEXT: RGBColor = RGBColor(0x33, 0x38, 0x44);
pub(crate) const AXIS: RGBColor = RGBColor(0x9A, 0xA0, 0xAC);
pub(crate) const GRID: RGBColor = RGBColor(0xE6, 0xE8, 0xEC);
/// What a peer wins, in the summary picture.
pub(crate) const LOSS: RGBColor = RGBColor(0xB0, 0x12, 0x2B);
pub(crate) const LOSS_SIDE: RGBColor = RGBColor(0xFB, 0xEC, 0xEE);

/// The limits: the copy, or the least memory.
pub(crate) const LIMIT: Colour = Colour { light: (0x11, 0x14, 0x1A), dark: "#f4f6f9" };

/// A provider's colour on light and on dark ground.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Colour {
    light: (u8, u8, u8),
    pub(crate) dark: &'static str,
}

impl Colour {
    pub(crate) fn rgb(self) -> RGBColor {
        RGBColor(self.light.0, self.light.1, self.light.2)
    }

    /// As plotters writes it.
    pub(crate) fn hex(self) -> String {
        hex(self.rgb())
    }
}

pub(crate) fn hex(RGBColor(r, g, b): RGBColor) -> String {
    format!("#{r:02X}{g:02X}{b:02X}")
}

/// The palette of Okabe and Ito, which colour-blind readers can tell apart.
const KNOWN: [(&str, Colour); 9] = [
    ("fuselane", Colour { light: (0x00, 0x72, 0xB2), dark: "#4db2f0" }),
    ("fuselane_gpu", Colour { light: (0x11, 0x77, 0x99), dark: "#3fb8d9" }),
    ("fuselane_table", Colour { light: (0x56, 0xB4, 0xE9), dark: "#a5dcff" }),
    ("fuselane_python", Colour { light: (0x4B, 0x5F, 0xC4), dark: "#93a3ff" }),
    ("unfused", Colour { light: (0x8C, 0x8C, 0x8C), dark: "#9a9a9a" }),
    ("candle", Colour { light: (0xE6, 0x9F, 0x00), dark: "#f2b632" }),
    ("torch", Colour { light: (0xD5, 0x5E, 0x00), dark: "#ff8b3d" }),
    ("torch_compile", Colour { light: (0xCC, 0x79, 0xA7), dark: "#e59cc6" }),
    ("jax", Colour { light: (0x00, 0x9E, 0x73), dark: "#2fc497" }),
];

/// For providers that a later version may add.
const MORE: [Colour; 4] = [
    Colour { light: (0x88, 0x22, 0x55), dark: "#d96aa0" },
    Colour { light: (0x99, 0x99, 0x33), dark: "#cfcf5a" },
    Colour { light: (0x33, 0x22, 0x88), dark: "#8f80ec" },
    Colour { light: (0x44, 0xAA, 0x99), dark: "#6fd6c5" },
];

/// The colour of a provider, the same in every picture of a run that has these `providers`.
pub(crate) fn of(provider: &str, providers: &[String]) -> Colour {
    if provider == COPY {
        return LIMIT;
    }
    let known = |name: &str| KNOWN.iter().find(|(known, _)| *known == name);
    if let Some((_, colour)) = known(provider) {
        return *colour;
    }
    let mut others = providers.iter().filter(|name| known(name).is_none());
    MORE[others.position(|name| name == provider).unwrap_or(0) % MORE.len()]
}
