// A function for each opcode that computes from registers alone, by the chapters of the PTX ISA. Names leave out the
// rounding to nearest. Approximations are computed in float64 and rounded, and then moved as far as a GPU may be off.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
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

template <class T> std::string name_of() {
    const char* of_integer = std::is_signed_v<T> ? ".s" : ".u";
    const char* kind = std::is_same_v<T, Bf16> ? ".bf" : std::is_integral_v<T> ? of_integer : ".f";
    return kind + std::to_string(8 * sizeof(T));
}

inline std::unordered_map<std::string, Compute> table;

// Not inlined 1,000 times: that takes g++ longer than all else.
[[gnu::noinline]] inline void put(const char* name, const std::string& kind, Compute function) {
    table[name + kind] = function;
}

#define SET(name, R, ...)                                                               \
    put(name, kind, [](Word A, [[maybe_unused]] Word B, [[maybe_unused]] Word C) {      \
        [[maybe_unused]] T a = bits_of<T>(A), b = bits_of<T>(B), c = bits_of<T>(C);     \
        [[maybe_unused]] uint32_t by = uint32_t(B);                                     \
        return word_of<R>(R(__VA_ARGS__));                                              \
    })

// --- 9.7.6 comparison and selection: the answer in bit 0, its opposite in bit 1 ---

#define COMPARE(name, condition) SET("setp." name, int, (condition) ? 1 : 2)

template <class T> void comparisons(const std::string& kind = name_of<T>()) {
    COMPARE("eq", a == b), COMPARE("ne", a < b || a > b), COMPARE("lt", a < b), COMPARE("le", a <= b);
    COMPARE("gt", a > b), COMPARE("ge", a >= b), SET("selp", T, C & 1 ? a : b);
    if constexpr (std::is_integral_v<T>) return;
    COMPARE("num", a == a && b == b), COMPARE("nan", a != a || b != b);  // those that end in u hold for a NaN
    COMPARE("equ", !(a < b || a > b)), COMPARE("neu", a != b), COMPARE("ltu", !(a >= b));
    COMPARE("leu", !(a > b)), COMPARE("gtu", !(a <= b)), COMPARE("geu", !(a < b));
}

// --- 9.7.1 integers, 9.7.8 logic and shift ---

// By zero gives all ones, as the ISA leaves it to the machine; the lowest number by -1 wraps.
template <class T> T divide(T a, T b) { return b == 0 ? T(~T(0)) : T(-1) < 0 && b == T(-1) ? T(-a) : T(a / b); }

template <class T> using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;

// A signed field of bits is filled with its highest bit.
template <class T> T field(T a, uint32_t start, uint32_t length) {
    const int unused = 128 - int(std::min(length & 255, 128u));
    return length & 255 ? T(Wide<T>(Wide<T>(a) >> std::min(start & 255, 127u)) << unused >> unused) : T(0);
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

template <class T> void integers(const std::string& kind = name_of<T>()) {
    static constexpr uint32_t bits = 8 * sizeof(T);
    using Twice = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    SET("add", T, a + b), SET("sub", T, a - b), SET("neg", T, -a), SET("abs", T, a < 0 ? -a : a);
    SET("mul.lo", T, a * b), SET("mad.lo", T, a * b + c), SET("mul.hi", T, Wide<T>(a) * Wide<T>(b) >> bits);
    SET("mul.wide", Twice, Twice(a) * Twice(b)), SET("mad.wide", Twice, Twice(a) * Twice(b) + Twice(C));
    SET("div", T, divide(a, b)), SET("rem", T, a - divide(a, b) * b), SET("bfe", T, field(a, by, uint32_t(C)));
    SET("min", T, std::min(a, b)), SET("max", T, std::max(a, b));
    SET("shr", T, Wide<T>(a) >> std::min(by, bits)), comparisons<T>(kind);
}

template <class T> void logic(const std::string& kind) {
    static constexpr uint32_t bits = 8 * sizeof(T);
    SET("and", T, a & b), SET("or", T, a | b), SET("xor", T, a ^ b), SET("not", T, T(-1) ^ a);
    SET("shl", T, by < bits ? Word(a) << by : 0), SET("shr", T, by < bits ? Word(a) >> by : 0);
    SET("popc", uint32_t, __builtin_popcountll(a)), comparisons<T>(kind);
}

// --- 9.7.3 to 9.7.5 floating point ---

// Of a number and a NaN the number; -0 is below +0.
template <class T> T least(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit(double(a)) ? a : b) : a < b ? a : b;
}

// Units in the last place that ex2 and lg2 of float32 are off at most, and what chooses how far each result is.
inline uint64_t off_by = 0, off_seed = 0;

template <class T> T approximate(T exact, Word operand) {
    if (!off_by || !std::isnormal(float(exact)) || operand << 33 == 0) return exact;  // of 0 it is 1
    const Word drawn = (operand ^ off_seed) * 0x9E3779B97F4A7C15 >> 33;
    return bits_of<T>(bits_of<Word>(exact) + drawn % (2 * off_by + 1) - off_by);
}

template <class T> void floats(const std::string& kind = name_of<T>()) {
    SET("add", T, a + b), SET("sub", T, a - b), SET("mul", T, a * b), SET("div", T, a / b);
    SET("fma", T, std::fma(a, b, c)), SET("sqrt", T, std::sqrt(a)), SET("rcp", T, 1 / a), comparisons<T>(kind);
    SET("neg", T, -a), SET("abs", T, std::fabs(a)), SET("copysign", T, std::copysign(b, a));
    SET("min", T, least(a, b)), SET("min.NaN", T, a != a || b != b ? T(NAN) : least(a, b));
    SET("max", T, -least(-a, -b)), SET("max.NaN", T, a != a || b != b ? T(NAN) : -least(-a, -b));
    if constexpr (sizeof(T) == 4) {  // in float64 first
        SET("ex2.approx", T, approximate(T(std::exp2(double(a))), A));
        SET("lg2.approx", T, approximate(T(std::log2(double(a))), A));
    }
}

// --- 9.7.9 conversion ---

// Clamped to its range; what a NaN gives is in the ISA's table.
template <class To, class From> To clamped(double x) {
    using Limits = std::numeric_limits<To>;
    constexpr int bits = 8 * sizeof(To);
    if (std::isnan(x)) return std::is_same_v<From, double> || bits == 64 ? To(Word(1) << (bits - 1)) : To(0);
    return x < double(Limits::min()) ? Limits::min() : x >= std::ldexp(1, Limits::digits) ? Limits::max() : To(x);
}

template <class To, class T> void conversion(const std::string& kind = name_of<To>() + name_of<T>()) {
    if constexpr (std::is_integral_v<T> || !std::is_integral_v<To>) SET("cvt", To, a);
    else SET("cvt.rzi", To, (clamped<To, T>(std::trunc(double(a)))));
}

template <class... T> struct Types {};
template <class To, class... From> void conversions_to(Types<From...>) { (conversion<To, From>(), ...); }
template <class... To> void conversions(Types<To...> all) { (conversions_to<To>(all), ...); }

template <class T> Word pair_of(Word high, Word low, Word) {
    return word_of(T(bits_of<float>(high))) << 16 | word_of(T(bits_of<float>(low)));
}

template <class T, class Holds> Word both(Word a, Word b, Word) {
    return Holds()(bits_of<T>(a), bits_of<T>(b)) | Holds()(bits_of<T>(a >> 16), bits_of<T>(b >> 16)) << 1;
}

template <class T> void pairs(const std::string& kind) {
    put("setp.lt", kind, both<T, std::less<float>>), put("setp.gt", kind, both<T, std::greater<float>>);
    put("setp.neu", kind, both<T, std::not_equal_to<float>>), put("setp.eq", kind, both<T, std::equal_to<float>>);
}

inline void fill_table() {
    integers<int16_t>(), integers<int32_t>(), integers<int64_t>(), floats<float>(), floats<double>();
    integers<uint16_t>(), integers<uint32_t>(), integers<uint64_t>(), comparisons<_Float16>(), comparisons<Bf16>();
    logic<uint16_t>(".b16"), logic<uint32_t>(".b32"), logic<uint64_t>(".b64"), logic<bool>(".pred");
    conversions(Types<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, float, double, _Float16,
                      Bf16>());
    table["mov"] = [](Word a, Word, Word) { return a; }, table["prmt.b32"] = permute;
    table["cvt.rmi.f64.f64"] = [](Word a, Word, Word) { return word_of(std::floor(bits_of<double>(a))); };
    // As a first guess it is asked for: the upper half of the bits.
    table["rcp.approx.f64"] = [](Word a, Word, Word) { return word_of(1 / bits_of<double>(a)) >> 32 << 32; };
    table["cvt.bf16x2.f32"] = pair_of<Bf16>, table["cvt.f16x2.f32"] = pair_of<_Float16>;
    pairs<Bf16>(".bf16x2"), pairs<_Float16>(".f16x2");
    table["add.s16x2"] = [](Word a, Word b, Word) { return ((a + b) & 0xFFFF) | ((a >> 16) + (b >> 16)) << 16; };
}
