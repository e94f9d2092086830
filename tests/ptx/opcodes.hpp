// A function for each opcode that computes from registers alone, by the chapters of the PTX ISA. Names leave out the
// rounding to nearest. Approximations are computed in float64 and rounded, and then moved as far as a GPU may be off.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_map>

// A register: an instruction takes the low bits that its type has.
using Word = uint64_t;
using Compute = Word (*)(Word, Word, Word);

template <class To, class From> To bits_of(From x) {
    if constexpr (std::is_same_v<To, bool>) return x & 1;  // "true" is written as -1 too
    To y{};
    memcpy(&y, &x, std::min(sizeof x, sizeof y));
    return y;
}

struct Bf16 {
    uint16_t bits;
    Bf16() = default;
    Bf16(float x) {  // to the nearest, ties to even
        const uint32_t wide = bits_of<uint32_t>(x);
        bits = std::isnan(x) ? 0x7FFF : (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
    }
    operator float() const { return bits_of<float>(uint32_t(bits) << 16); }
};

// A signed value fills the register with its sign, as a load into a wider one does.
template <class T> Word word_of(T x) {
    if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) return Word(int64_t(x));
    return bits_of<Word>(x);
}

inline std::unordered_map<std::string, Compute> table;

// Not inlined 1,000 times: that takes g++ longer than all else.
[[gnu::noinline]] inline void put(const char* name, const char* kind, Compute function) {
    table[std::string(name) + "." + kind] = function;
}

#define SET(name, R, ...)                                                               \
    put(name, kind, [](Word A, [[maybe_unused]] Word B, [[maybe_unused]] Word C) {      \
        [[maybe_unused]] T a = bits_of<T>(A), b = bits_of<T>(B), c = bits_of<T>(C);     \
        [[maybe_unused]] uint32_t by = uint32_t(B);                                     \
        return word_of<R>(R(__VA_ARGS__));                                              \
    })

// --- 9.7.1 integers, 9.7.8 logic and shift ---

// By zero gives all ones, as the ISA leaves it to the machine; the lowest number by -1 wraps.
template <class T> T divide(T a, T b) { return b == 0 ? T(~T(0)) : T(-1) < 0 && b == T(-1) ? T(-a) : T(a / b); }

// A signed field of bits is filled with its highest bit.
template <class T> T field(T a, uint32_t start, uint32_t length) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    const int unused = 128 - int(std::min(length & 255, 128u));
    return length & 255 ? T(Wide(Wide(a) >> std::min(start & 255, 127u)) << unused >> unused) : T(0);
}

// Four of the eight bytes of two registers; the highest bit of a selector repeats the byte's sign.
inline Word permute(Word a, Word b, Word selector) {
    const Word both = uint32_t(a) | b << 32;
    Word out = 0;
    for (int i = 0; i < 4; i++) {
        const Word choice = selector >> 4 * i & 15, byte = both >> 8 * (choice & 7) & 255;
        out |= (choice & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return out;
}

template <class T> void integers(const char* kind) {
    constexpr bool is_signed = std::is_signed_v<T>;
    static constexpr uint32_t bits = 8 * sizeof(T);
    using Wide = std::conditional_t<is_signed, __int128, unsigned __int128>;
    using Twice = std::conditional_t<is_signed, int64_t, uint64_t>;
    SET("add", T, a + b), SET("sub", T, a - b), SET("neg", T, -a), SET("abs", T, a < 0 ? -a : a);
    SET("mul.lo", T, a * b), SET("mad.lo", T, a * b + c), SET("mul.hi", T, Wide(a) * Wide(b) >> bits);
    SET("mul.wide", Twice, Twice(a) * Twice(b)), SET("mad.wide", Twice, Twice(a) * Twice(b) + Twice(C));
    SET("div", T, divide(a, b)), SET("rem", T, a - divide(a, b) * b), SET("bfe", T, field(a, by, uint32_t(C)));
    SET("min", T, std::min(a, b)), SET("max", T, std::max(a, b));
    SET("shr", T, Wide(a) >> std::min(by, bits));
}

template <class T> void logic(const char* kind) {
    static constexpr uint32_t bits = 8 * sizeof(T);
    SET("and", T, a & b), SET("or", T, a | b), SET("xor", T, a ^ b), SET("not", T, T(-1) ^ a);
    SET("shl", T, by < bits ? Word(a) << by : 0), SET("shr", T, by < bits ? Word(a) >> by : 0);
    SET("popc", uint32_t, __builtin_popcountll(a)), SET("exch", T, b), SET("cas", T, a == b ? c : a);
}

// --- 9.7.6 comparison and selection: the answer in bit 0, its opposite in bit 1 ---

#define COMPARE(name, condition) SET("setp." name, int, (condition) ? 1 : 2)

template <class T> void comparisons(const char* kind) {
    COMPARE("eq", a == b), COMPARE("ne", a < b || a > b), COMPARE("lt", a < b), COMPARE("le", a <= b);
    COMPARE("gt", a > b), COMPARE("ge", a >= b), SET("selp", T, C & 1 ? a : b);
    if constexpr (std::is_unsigned_v<T>)
        COMPARE("lo", a < b), COMPARE("ls", a <= b), COMPARE("hi", a > b), COMPARE("hs", a >= b);
    if constexpr (!std::is_integral_v<T>) {  // those that end in u hold for a NaN
        COMPARE("num", a == a && b == b), COMPARE("nan", a != a || b != b);
        COMPARE("equ", !(a < b || a > b)), COMPARE("neu", a != b), COMPARE("ltu", !(a >= b));
        COMPARE("leu", !(a > b)), COMPARE("gtu", !(a <= b)), COMPARE("geu", !(a < b));
    }
}

// --- 9.7.3 to 9.7.5 floating point ---

// Of a number and a NaN the number; -0 is below +0.
template <class T> T least(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit(double(a)) ? a : b) : a < b ? a : b;
}

template <class T> T fused(T a, T b, T c) {
    if constexpr (sizeof(T) >= 4) return std::fma(a, b, c);
    return T(float(double(a) * double(b) + double(c)));
}

// Units in the last place that ex2 and lg2 of float32 are off at most, and what chooses how far each result is.
inline uint64_t off_by = 0, off_seed = 0;

template <class T> T approximate(T exact, Word operand) {
    if (!off_by || sizeof(T) != 4 || !std::isnormal(float(exact)) || operand << 33 == 0) return exact;  // of 0 it is 1
    const Word drawn = (operand ^ off_seed) * 0x9E3779B97F4A7C15 >> 33;
    return bits_of<T>(bits_of<Word>(exact) + drawn % (2 * off_by + 1) - off_by);
}

template <class T> void floats(const char* kind) {
    SET("add", T, a + b), SET("sub", T, a - b), SET("mul", T, a * b), SET("div", T, a / b);
    SET("fma", T, fused(a, b, c)), SET("neg", T, -a), SET("abs", T, std::fabs(double(a)));
    SET("copysign", T, std::copysign(double(b), double(a)));
    SET("min", T, least(a, b)), SET("min.NaN", T, a != a || b != b ? T(NAN) : least(a, b));
    SET("max", T, -least(T(-a), T(-b))), SET("max.NaN", T, a != a || b != b ? T(NAN) : T(-least(T(-a), T(-b))));
    SET("ex2", T, approximate(T(std::exp2(double(a))), A)), SET("lg2", T, approximate(T(std::log2(double(a))), A));
    SET("sqrt", T, std::sqrt(double(a))), SET("rsqrt", T, 1 / std::sqrt(double(a))), SET("rcp", T, 1 / double(a));
}

// --- 9.7.9 conversion ---

// Clamped to its range; what a NaN gives is in the ISA's table.
template <class To, class From> To clamped(double x) {
    constexpr int bits = 8 * sizeof(To);
    using Limits = std::numeric_limits<To>;
    if (std::isnan(x)) return std::is_same_v<From, double> || bits == 64 ? To(Word(1) << (bits - 1)) : To(0);
    return x < double(Limits::min()) ? Limits::min() : x >= std::ldexp(1, Limits::digits) ? Limits::max() : To(x);
}

template <class To, class T> To rounded(double x) {
    if constexpr (std::is_integral_v<To>) return clamped<To, T>(x);
    else return To(x);
}

template <class To, class T> void conversion(std::string to, const char* from) {
    const std::string kinds = to + "." + from;
    const char* kind = kinds.c_str();
    if constexpr (std::is_integral_v<T> || !std::is_integral_v<To>) SET("cvt", To, a);
    if constexpr (!std::is_integral_v<T> && (std::is_integral_v<To> || std::is_same_v<To, T>)) {
        SET("cvt.rni", To, (rounded<To, T>(std::nearbyint(double(a)))));
        SET("cvt.rzi", To, (rounded<To, T>(std::trunc(double(a)))));
        SET("cvt.rmi", To, (rounded<To, T>(std::floor(double(a)))));
        SET("cvt.rpi", To, (rounded<To, T>(std::ceil(double(a)))));
    }
}

// --- all of them ---

template <class F> void each_integer(F f) {
    f(int16_t(), "s16"), f(uint16_t(), "u16"), f(int32_t(), "s32"), f(uint32_t(), "u32"), f(int64_t(), "s64");
    f(uint64_t(), "u64");
}

template <class F> void each_float(F f) { f(float(), "f32"), f(double(), "f64"), f(_Float16(), "f16"), f(Bf16(), "bf16"); }

template <class F> void each_bits(F f) { f(uint16_t(), "b16"), f(uint32_t(), "b32"), f(uint64_t(), "b64"); }

template <class F> void each_number(F f) { each_integer(f), each_float(f), f(int8_t(), "s8"), f(uint8_t(), "u8"); }

template <class T> Word pair_of(Word high, Word low) {
    return word_of(T(bits_of<float>(high))) << 16 | word_of(T(bits_of<float>(low)));
}

inline void fill_table() {
    each_integer([](auto x, auto kind) { integers<decltype(x)>(kind), comparisons<decltype(x)>(kind); });
    each_float([](auto x, auto kind) { floats<decltype(x)>(kind), comparisons<decltype(x)>(kind); });
    each_bits([](auto x, auto kind) { logic<decltype(x)>(kind), comparisons<decltype(x)>(kind); });
    logic<bool>("pred");
    each_number([](auto to, auto name) {
        each_number([&](auto from, auto other) { conversion<decltype(to), decltype(from)>(name, other); });
    });
    table["mov"] = [](Word a, Word, Word) { return a; };
    table["prmt.b32"] = permute;
    // As a first guess it is asked for: the upper half of the bits.
    table["rcp.approx.f64"] = [](Word a, Word, Word) { return word_of(1 / bits_of<double>(a)) >> 32 << 32; };
    table["cvt.bf16x2.f32"] = [](Word a, Word b, Word) { return pair_of<Bf16>(a, b); };
    table["cvt.f16x2.f32"] = [](Word a, Word b, Word) { return pair_of<_Float16>(a, b); };
    table["add.s16x2"] = [](Word a, Word b, Word) { return ((a + b) & 0xFFFF) | ((a & 0xFFFF0000) + (b & 0xFFFF0000)); };
    for (std::string how : {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"})
        for (std::string kind : {"bf16", "f16"}) table["setp." + how + "." + kind + "x2"] = table["setp." + how + "." + kind];
}
