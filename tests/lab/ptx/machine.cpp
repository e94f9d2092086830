// Runs the programs of a launch, one after the other, thread by thread, and watches every access.
//
// machine.py hands over steps and memory, and words the findings. Chapters are those of the PTX ISA. Constants and
// special registers are registers too, filled when a program begins.

#include <random>
#include <vector>

#include "opcodes.hpp"

constexpr int LANES = 32;
constexpr uint32_t EVERY_LANE = 0xFFFFFFFF;

// --- what Python has too: native.py reads it here; each member has 8 bytes ---

// Those from SHUFFLE to BARRIER are of all threads of a warp together.
enum Action { COMPUTE, PACK, LOAD, STORE, ATOMIC, SHUFFLE, REDUCE, BARRIER, BRANCH, EXIT };
enum Space { GLOBAL, SHARED };
enum Mode { BFLY, DOWN, UP, IDX };
enum Kind { BOUNDS, ALIGNMENT, UNWRITTEN, RACE_IN_A_PROGRAM, RACE_OF_PROGRAMS, DIVERGENCE, ENDLESS };
// Where the parts of a stamp begin: thread, epoch (barriers that the program has passed), program, launch.
enum Stamp { EPOCH = 10, PROGRAM = 27, LAUNCH = 49 };

struct Step {
    Compute compute;
    int64_t action, guard, negated, flush_from, flush_to, space, width, is_signed, matrix, mode, target,
        orders;  // an atomic that acquires and releases
    int64_t place;  // what is added to an address
    int64_t shift;  // bits from one register to the next, where several hold the parts of a word
    int64_t to_count, of_count, to[5], of[5];
};

// Who touched an element of a tensor, or a few bytes of shared memory, as stamps; 0 is nobody. Of who read, and of
// atomics: the last thread, the one before, and one of an earlier program, since programs come one by one.
struct Cell {
    Word wrote, reads[3], atomics[3];
};

struct Region {
    uint8_t* data;
    int64_t base, size, item;
    int64_t fresh;  // nobody has put values there before the first launch
    Cell* cells;    // null: nothing is recorded
    int64_t axes, shape[4], strides[4];  // by falling stride; none where no gap is between elements
};

struct Finding {
    int64_t kind, step, program, thread, threads, region, place, other;
};

struct Task {
    const Step* code;  // the last one ends a thread
    const Word* initial;  // of each register; the first hold %tid.x, %ctaid.x and __local_depot0
    uint64_t* executed;  // by how many threads, of each step
    uint64_t* bytes;  // [space][read, written], then sectors of global memory
    const int64_t* programs;  // numbers of those that run
    Region* regions;  // tensors, then the shared memory of a program
    Finding* findings;
    int64_t end, registers, program_count, tensors, found, capacity, threads, launch, seed, most;  // steps of a program
    int64_t local, local_bytes;  // memory of the first thread, and how much each has
    int64_t off_by, off_seed;  // of approximations, see opcodes.hpp
};

struct Warp {
    std::vector<Word> registers;
    int64_t at[LANES];
    int first;  // thread
};

bool is_of_warp(const Step& x) { return (x.action >= SHUFFLE && x.action <= BARRIER) || x.matrix; }

// A subnormal float32 is a zero of its sign.
Word flushed(Word word) { return word & 0x7F800000 ? word : word & 0x80000000; }

// Between the elements of a tensor that is not contiguous lies somebody else's memory.
bool is_gap(const Region& r, int64_t element) {
    for (int i = 0; i < r.axes; i++)
        element -= std::min(r.strides[i] ? element / r.strides[i] : 0, r.shape[i] - 1) * r.strides[i];
    return r.axes && element != 0;
}

void note(Word* touched, Word now) {
    if ((touched[0] ^ now) >> PROGRAM) touched[2] = touched[0];
    if (touched[0] != now) touched[1] = touched[0], touched[0] = now;
}

class Launch {
   public:
    explicit Launch(Task& task) : task(task), random(task.seed), warps(task.threads / LANES) {}

    void run(int64_t number) {
        program = number, epoch = 0, steps = 0;
        acquired.clear();
        const Region& shared = task.regions[task.tensors];
        if (shared.cells) std::fill_n(shared.cells, shared.size / shared.item, Cell{});
        std::vector<Warp*> order;
        for (Warp& warp : warps) {
            begin(warp, LANES * int(order.size()));
            order.push_back(&warp);
        }
        do {  // an epoch, in a new order of the warps
            std::shuffle(order.begin(), order.end(), random);
            for (Warp* warp : order) run_warp(*warp);
        } while (pass_barrier());
    }

   private:
    Task& task;
    std::mt19937_64 random;
    std::vector<Warp> warps;
    int64_t program = 0, epoch = 0, steps = 0;
    // What a counter hands on of the programs that released it, and what this program has acquired, and when: stamps.
    struct Known { Word released, acquired; };
    using Stamps = std::unordered_map<Word, Known>;  // by program
    std::unordered_map<Word, Stamps> handed_on;
    Stamps acquired;

    void begin(Warp& warp, int first) {
        warp.first = first;
        warp.registers.clear();
        for (int i = 0; i < task.registers; i++) warp.registers.insert(warp.registers.end(), LANES, task.initial[i]);
        for (int i = 0; i < LANES; i++) {
            warp.registers[i] = first + i;
            warp.registers[LANES + i] = program;
            warp.registers[2 * LANES + i] = task.local + (first + i) * task.local_bytes;
            warp.at[i] = 0;
        }
    }

    void report(Kind kind, const Step& x, int thread, int64_t region, int64_t place, int64_t other = 0) {
        for (Finding* f = task.findings; f < task.findings + task.found; f++)
            if (f->kind == kind && f->step == &x - task.code) {
                f->threads += f->program == program;
                return;
            }
        if (task.found < task.capacity)
            task.findings[task.found++] = {kind, &x - task.code, program, thread, 1, region, place, other};
    }

    // Begin another epoch if every warp waits at one barrier. Who waits for a warp that will not come is reported.
    bool pass_barrier() {
        const Warp* first = nullptr;
        for (Warp& warp : warps) first = !first && warp.at[0] != task.end ? &warp : first;
        if (!first) return false;
        const int64_t here = first->at[0];
        bool all = true;
        for (Warp& warp : warps) {
            if (warp.at[0] != here) report(DIVERGENCE, task.code[here], first->first, -1, warp.at[0]);
            all = all && warp.at[0] == here;
            std::fill_n(warp.at, LANES, here + 1);
        }
        if (++epoch == 1 << (PROGRAM - EPOCH)) std::abort();  // more than a stamp can count
        return all;
    }

    // Run a warp to its end or to a barrier. Of threads that have parted those that are behind go first, so that they
    // meet the others again; for an exchange or a barrier all of a warp have to come.
    void run_warp(Warp& warp) {
        for (;;) {
            const bool together = std::equal(warp.at + 1, warp.at + LANES, warp.at);
            int64_t here = together ? warp.at[0] : task.end, waiting = task.end;
            for (int i = 0; i < LANES && !together; i++) {
                int64_t& least = is_of_warp(task.code[warp.at[i]]) ? waiting : here;
                least = std::min(least, warp.at[i]);
            }
            const Step& x = task.code[here];
            const bool endless = here < task.end && ++steps > task.most;
            if (endless) report(ENDLESS, x, warp.first, -1, 0);
            if (endless || here == task.end) {
                for (int i = 0; i < LANES && waiting < task.end; i++)
                    if (warp.at[i] != waiting) report(DIVERGENCE, task.code[waiting], warp.first + i, -1, warp.at[i]);
                std::fill_n(warp.at, LANES, task.end);
                return;
            }
            uint32_t active = 0;
            const Word* guard = x.guard < 0 ? nullptr : &warp.registers[x.guard * LANES];
            const int64_t next = x.action == BARRIER ? here : here + 1, target = x.action < BRANCH ? next : x.target;
            for (int i = 0; i < LANES; i++) {
                if (warp.at[i] != here) continue;
                const bool is_active = !guard || (guard[i] & 1) != Word(x.negated);
                active |= uint32_t(is_active) << i;
                warp.at[i] = is_active ? target : next;
                task.executed[here]++;
            }
            const bool exchanges = x.action == SHUFFLE || x.action == REDUCE;
            const Word* members = exchanges ? &warp.registers[x.of[x.of_count - 1] * LANES] : nullptr;
            for (int i = 0; i < LANES && is_of_warp(x); i++)
                if (!(active >> i & 1) || (members && uint32_t(members[i]) != EVERY_LANE))
                    report(DIVERGENCE, x, warp.first + i, -1, here);
            if (x.action == BARRIER) return;
            if (active && x.action < BRANCH) step(warp, x, active);
        }
    }

    void step(Warp& warp, const Step& x, uint32_t active) {
        auto of = [&](int i) { return &warp.registers[x.of[i] * LANES]; };
        auto to = [&](int i) { return &warp.registers[x.to[i] * LANES]; };
        auto each = [&](auto&& what) {
            for (int i = 0; i < LANES; i++)
                if (active >> i & 1) what(i);
        };
        Word *a = of(0), *b = of(1), *c = of(2), *out = to(0);
        switch (x.action) {
            case COMPUTE:
                each([&](int i) {
                    const Word found = x.flush_from ? x.compute(flushed(a[i]), flushed(b[i]), flushed(c[i]))
                                                    : x.compute(a[i], b[i], c[i]);
                    out[i] = x.flush_to ? flushed(found) : found;
                    for (int j = 1; j < x.to_count; j++) to(j)[i] = found >> x.shift * j;
                });
                break;
            case PACK:
                each([&](int i) {
                    Word whole = 0;
                    for (int j = 0; j < x.of_count; j++) whole |= of(j)[i] % (Word(1) << x.shift) << x.shift * j;
                    out[i] = whole;
                });
                break;
            case SHUFFLE: shuffle(a, b, c, x, out); break;
            case REDUCE: {
                Word all = a[0];
                for (int i = 1; i < LANES; i++) all = x.compute(all, a[i], 0);
                std::fill_n(out, LANES, all);
                break;
            }
            default: access(warp, x, active);
        }
    }

    // 9.7.9.6: whose value each thread gets, as the ISA's pseudo-code has it.
    static void shuffle(const Word* value, const Word* by, const Word* limit, const Step& x, Word* out) {
        Word found[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int clamp = limit[lane] & 31, segment = limit[lane] >> 8 & 31, b = by[lane] & 31;
            const int highest = (lane & segment) | (clamp & ~segment & 31);
            const int sources[] = {lane ^ b, lane + b, lane - b, (lane & segment) | (b & ~segment & 31)};
            const int source = sources[x.mode];
            found[lane] = value[(x.mode == UP ? source >= highest : source <= highest) ? source : lane];
        }
        std::copy_n(found, LANES, out);
    }

    // --- 9.7.9.8 and on: accesses ---

    // Of a matrix of 8 rows thread i has word i % 4 of row i / 4, whose place thread 8 * matrix + row knows.
    void access(Warp& warp, const Step& x, uint32_t active) {
        const int count = x.action == LOAD ? x.to_count : x.action == STORE ? x.of_count - 1 : 1;
        const int size = count * x.width, writes = x.action != LOAD;
        std::vector<Word> sectors;
        Region* r = nullptr;
        for (int i = 0; i < LANES; i++) {
            if (!(active >> i & 1)) continue;
            auto of = [&](int j, int lane) { return warp.registers[x.of[j] * LANES + lane]; };
            Word address = 0;
            for (int j = 0; j < count; j++) {
                if (j == 0 || x.matrix) {
                    const Word base = of(0, x.matrix ? 8 * j + i / 4 : i);
                    address = (x.space == SHARED ? uint32_t(base) : base) + Word(x.place);
                    r = region_of(x, address, size, warp.first + i, r);
                    sectors.insert(sectors.end(), {address >> 5, (address + size - 1) >> 5});
                }
                Word word = x.action == STORE ? of(j + 1, i) : 0;
                if (r) {
                    const int64_t at = address - r->base + (x.matrix ? i % 4 : j) * x.width;
                    if (r->cells) watch(x, *r, at, warp.first + i, word);
                    if (x.action != STORE) memcpy(&word, r->data + at, x.width);
                    const Word now = x.action == ATOMIC ? x.compute(word, of(1, i), 0) : word;
                    if (writes) memcpy(r->data + at, &now, x.width);
                }
                const int unused = x.is_signed ? 64 - 8 * x.width : 0;
                if (j < x.to_count) warp.registers[x.to[j] * LANES + i] = Word(int64_t(word << unused) >> unused);
            }
        }
        task.bytes[2 * x.space + writes] += __builtin_popcount(active) * size;
        std::sort(sectors.begin(), sectors.end());
        if (x.space == GLOBAL) task.bytes[4 + writes] += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
    }

    // Find the memory that an address leads to, perhaps that of the thread before, or report that it leads nowhere.
    Region* region_of(const Step& x, Word address, int size, int thread, Region* found) {
        Region* const shared = task.regions + task.tensors;
        Region *first = x.space == SHARED ? shared : task.regions, *last = x.space == SHARED ? shared + 1 : shared;
        auto has = [&](const Region& r) { return address >= Word(r.base) && address - r.base + size <= Word(r.size); };
        if (!found || !has(*found)) found = std::find_if(first, last, has);
        if (address % size == 0 && found != last) return found;
        report(address % size ? ALIGNMENT : BOUNDS, x, thread, -1, int64_t(address), size);
        return nullptr;
    }

    // Check and record an access of one thread to one word; given is what a store writes.
    void watch(const Step& x, Region& r, int64_t at, int thread, Word given) {
        const Word now = Word(task.launch) << LAUNCH | Word(program) << PROGRAM | Word(epoch) << EPOCH | thread;
        const int64_t region = &r - task.regions;
        for (int64_t i = at / r.item; i <= (at + x.width - 1) / r.item; i++) {
            Cell& cell = r.cells[i];
            if (is_gap(r, i)) report(BOUNDS, x, thread, region, at);
            if (x.action != STORE && r.fresh && !cell.wrote) report(UNWRITTEN, x, thread, region, i * r.item);
            Word other = races(cell.wrote, now) ? cell.wrote : 0;
            // Triton's layouts repeat values: that threads of one program write one value to one place is no race.
            if (x.action == STORE && !((other ^ now) >> PROGRAM) && !memcmp(r.data + at, &given, x.width)) other = 0;
            if (!other && x.action != LOAD) other = racing(cell.reads, now);
            if (!other && x.action != ATOMIC) other = racing(cell.atomics, now);
            if (other) {
                const Kind kind = (other ^ now) >> PROGRAM ? RACE_OF_PROGRAMS : RACE_IN_A_PROGRAM;
                report(kind, x, thread, region, i * r.item, int64_t(other));
            }
            if (x.action == STORE) cell.wrote = now;
            else note(x.action == ATOMIC ? cell.atomics : cell.reads, now);
        }
        if (x.orders) order(Word(r.base + at), now);
    }

    // Tell whether nothing orders two accesses of one launch: by two threads in one epoch, or by two programs, unless
    // one released a counter afterwards that the other acquired before. A barrier hands both on to all of a program.
    bool races(Word before, Word now) const {
        const Word apart = before ^ now;
        if (!before || !apart || apart >> LAUNCH || (!(apart >> PROGRAM) && apart >> EPOCH)) return false;
        const auto found = acquired.find(before >> PROGRAM);
        if (!(apart >> PROGRAM) || found == acquired.end()) return true;
        auto is_before = [](Word x, Word y) { return x >> EPOCH < y >> EPOCH || x == y; };  // of one program
        return !is_before(before, found->second.released) || !is_before(found->second.acquired, now);
    }

    Word racing(const Word* touched, Word now) const {
        const Word* found = std::find_if(touched, touched + 3, [&](Word before) { return races(before, now); });
        return found == touched + 3 ? 0 : *found;
    }

    // What an atomic that acquires and releases takes over from its counter, and hands on.
    void order(Word address, Word now) {
        Stamps& counter = handed_on[address];
        for (auto& [program, known] : counter) acquired[program] = {known.released, now};
        for (auto& [program, known] : acquired) counter[program] = known;
        counter[now >> PROGRAM] = {now, 0};
    }
};

extern "C" {
Compute find(const char* opcode) {
    if (table.empty()) fill_table();
    const auto entry = table.find(opcode);
    return entry == table.end() ? nullptr : entry->second;
}

Word compute(Compute function, Word a, Word b, Word c) { return function(a, b, c); }

void run(Task* task) {
    Launch launch(*task);
    off_by = task->off_by, off_seed = task->off_seed;
    for (int64_t i = 0; i < task->program_count; i++) launch.run(task->programs[i]);
    off_by = 0;
}
}
