// Splits independent items over threads. The GIL is released by the caller; no OpenMP runtime is
// loaded, so none can clash with torch's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace steelyard {

// Calls body(begin, end) for consecutive ranges of at most `grain` items until all are done.
// The ranges do not depend on the number of threads, so neither does a result.
template <class Body>
void parallel_for(int64_t items, int64_t grain, int threads, const Body& body) {
    grain = std::max<int64_t>(grain, 1);
    const int64_t chunks = (items + grain - 1) / grain;
    threads = static_cast<int>(std::min<int64_t>(threads, chunks));
    std::atomic<int64_t> next{0};
    std::exception_ptr failure;
    std::atomic<bool> failed{false};
    auto work = [&] {
        for (;;) {
            const int64_t chunk = next.fetch_add(1);
            if (chunk >= chunks || failed.load()) return;
            try {
                body(chunk * grain, std::min(items, (chunk + 1) * grain));
            } catch (...) {
                if (!failed.exchange(true)) failure = std::current_exception();
            }
        }
    };
    if (threads <= 1) {
        work();
    } else {
        std::vector<std::thread> team;
        team.reserve(threads - 1);
        try {
            for (int t = 1; t < threads; ++t) team.emplace_back(work);
        } catch (const std::system_error& error) {
            // running threads must be joined before the vector is destroyed, or the process ends
            if (!failed.exchange(true))
                failure = std::make_exception_ptr(std::runtime_error(
                    "cannot start thread " + std::to_string(team.size() + 2) + " of " +
                    std::to_string(threads) + " (" + error.what() +
                    "); allow more processes or memory, or lower torch.set_num_threads"));
        }
        work();
        for (auto& thread : team) thread.join();
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace steelyard
